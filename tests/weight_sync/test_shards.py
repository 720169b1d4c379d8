"""The part of a tensor that a worker of a split engine must hold is what vLLM's own layers load on it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import ClassVar

import pytest
import torch
from torch import nn
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.distributed import parallel_state
from vllm.model_executor.layers import linear, vocab_parallel_embedding

from rlhf_suite.weight_sync.digests import TensorEntry, digest
from rlhf_suite.weight_sync.read_back import ModelReader
from rlhf_suite.weight_sync.shards import own_entry, own_part

HEAD, WIDTH, INNER = 4, 8, 12
ROWS = {"q_proj": 4 * HEAD, "k_proj": 2 * HEAD, "v_proj": 2 * HEAD}
VOCABULARY = 70  # it ends in the middle of the rows of a worker


class Layers(nn.Module):
    """One layer of each kind, as vLLM's models have them, on one of the workers of an engine."""

    packed_modules_mapping: ClassVar = {"qkv_proj": [*ROWS], "gate_up_proj": ["gate_proj", "up_proj"]}

    def __init__(self) -> None:
        super().__init__()
        self.embed_tokens = vocab_parallel_embedding.VocabParallelEmbedding(VOCABULARY, WIDTH)
        self.qkv_proj = linear.QKVParallelLinear(WIDTH, HEAD, 4, 2, bias=True)
        self.o_proj = linear.RowParallelLinear(4 * HEAD, WIDTH, bias=True)
        self.gate_up_proj = linear.MergedColumnParallelLinear(WIDTH, [INNER, INNER], bias=False)
        self.whole_qkv = linear.QKVParallelLinear(WIDTH, HEAD, 4, 2, bias=False)
        self.up = linear.ColumnParallelLinear(WIDTH, INNER, bias=True)
        self.norm = nn.LayerNorm(WIDTH)


def tensors() -> dict[str, torch.Tensor]:
    """What the checkpoint of such a model has, whole."""
    generator = torch.Generator().manual_seed(0)
    shapes = {"embed_tokens.weight": (VOCABULARY, WIDTH), "o_proj.weight": (WIDTH, 4 * HEAD), "o_proj.bias": (WIDTH,)}
    shapes |= {f"{name}.weight": (rows, WIDTH) for name, rows in ROWS.items()}
    shapes |= {f"{name}.bias": (rows,) for name, rows in ROWS.items()}
    shapes |= {f"{name}.weight": (INNER, WIDTH) for name in ("gate_proj", "up_proj", "up")}
    shapes |= {"whole_qkv.weight": (sum(ROWS.values()), WIDTH), "up.bias": (INNER,), "norm.weight": (WIDTH,)}
    return {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}


def loaded(model: Layers, name: str, whole: torch.Tensor) -> torch.Tensor:
    """What vLLM's loader of the layer puts into it of a tensor, and nothing of the others."""
    place = ModelReader(model, {}).place(name)
    assert place is not None
    parameter = getattr(place.module, place.leaf)
    parameter.data = torch.full_like(parameter.data, torch.nan, dtype=torch.float32)
    if not hasattr(parameter, "weight_loader"):
        return whole
    parts = {"q_proj": "q", "k_proj": "k", "v_proj": "v", "gate_proj": 0, "up_proj": 1}
    shard = (parts[place.part],) if place.part in parts else ()
    parameter.weight_loader(parameter, whole, *shard)
    held = parameter.data if parameter.ndim == 1 else parameter.data[~parameter.data.isnan().all(1)]
    held = held[~held.isnan()] if held.ndim == 1 else held
    return held[held.abs().sum(1) > 0] if place.path == "embed_tokens" else held  # vLLM fills padding with zeros


def entry_of(name: str, whole: torch.Tensor) -> TensorEntry:
    return TensorEntry(name, tuple(whole.shape), "float32", 0, whole.nbytes, digest(whole))


@pytest.fixture(params=[(2, 0), (2, 1), (4, 1), (4, 3)], ids="worker {0[1]} of {0[0]}".format)
def model(request, monkeypatch):
    """The layers of one worker; with four workers, two hold the same key/value head."""
    size, rank = request.param
    monkeypatch.setattr(parallel_state, "_TP", SimpleNamespace(world_size=size, rank_in_group=rank))
    with set_current_vllm_config(VllmConfig()):
        return Layers()


@pytest.mark.parametrize("name", tensors())
def test_a_part_is_what_the_layer_loads(model, name):
    whole, reader = tensors()[name], ModelReader(model, {})
    place = reader.place(name)
    part = own_part(place, whole)
    assert torch.equal(part, loaded(model, name, whole))
    assert (part is whole) == (name in {"norm.weight", "o_proj.bias"}), "the others are split"
    entry = entry_of(name, whole)
    found = own_entry(reader, entry, whole)
    assert (found.shape, found.digest) == (tuple(part.shape), digest(part))


def test_a_layer_of_another_stage_has_no_part(model):
    from vllm.model_executor.models.utils import PPMissingLayer

    model.norm = PPMissingLayer()
    whole = tensors()["norm.weight"]
    entry = entry_of("norm.weight", whole)
    assert own_entry(ModelReader(model, {}), entry, whole) is None
    assert own_entry(ModelReader(model, {}), entry_of("elsewhere.weight", whole), whole) is None
