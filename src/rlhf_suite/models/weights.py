"""The weights of a model under their names in checkpoints: read one layer at a time, and written as
safetensors shards."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import split_torch_state_dict_into_shards
from safetensors.torch import save_file
from torch import Tensor
from transformers.core_model_loading import revert_weight_conversion

from rlhf_suite.models.forward import LanguageModel, ScalarModel
from rlhf_suite.models.lora import ADAPTER, merged_weight
from rlhf_suite.models.quantize import STATE, dequantized

BASE = re.compile(r"\.base_layer(?=\.)")  # occurs once for each adapter around a module
LAYER = re.compile(r"^.*?\.\d+(?=\.)")  # model.layers.7
INDEX = "model.safetensors.index.json"
SHARD_BYTES = 5 * 10**9

Gather = Callable[[Sequence[Tensor]], AbstractContextManager[Any]]


def whole(parameters: Sequence[Tensor]) -> AbstractContextManager[Any]:
    """Gather parameters that are not partitioned: do nothing."""
    return nullcontext()


@torch.no_grad()
def named_weights(model: LanguageModel | ScalarModel, gather: Gather = whole) -> Iterator[tuple[str, Tensor]]:
    """Yield (checkpoint name, tensor) of every weight, dequantised, with adapters merged and without tied heads.

    `gather` makes parameters whole that ZeRO-3 partitions. It is entered for one layer at a time and on every rank in
    the same order, so every rank must iterate to the end. A tensor may be the parameter itself, and it is whole only
    until the next one is requested: copy it to keep it.
    """
    hf = model.model
    tensors = _distinct({name: t for name, t in hf.state_dict(keep_vars=True).items() if not STATE.search(name)})
    for names in _layers(list(tensors)):
        with gather([tensors[name] for name in names]):
            layer = {plain_name(name): _merged(hf, name, tensors) for name in names if ".lora_" not in name}
            for name, tensor in revert_weight_conversion(hf, layer).items():
                yield checkpoint_name(model, name), tensor.detach()


def weights_on_cpu(model: LanguageModel | ScalarModel, gather: Gather = whole, keep: bool = True) -> dict[str, Tensor]:
    """Return all of `named_weights` as copies in host memory; an empty dict on ranks that only take part (`keep`
    false)."""
    copies = {}
    for name, tensor in named_weights(model, gather):
        if keep:
            copies[name] = tensor.to("cpu", copy=True).contiguous()
    return copies


def plain_name(name: str) -> str:
    """Return the name that a weight has in a model without adapters."""
    return BASE.sub("", name)


def checkpoint_name(model: LanguageModel | ScalarModel, name: str) -> str:
    """Return `name`, with the scalar head named by `ds.value_head_prefix`."""
    if isinstance(model, ScalarModel) and name.startswith("score."):
        return model.head_name + name.removeprefix("score")
    return name


def _distinct(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors without second names of the same tensor: a tied head repeats the embedding."""
    first_name = {id(tensor): name for name, tensor in reversed(tensors.items())}
    return {name: tensor for name, tensor in tensors.items() if first_name[id(tensor)] == name}


def _layers(names: list[str]) -> Iterator[list[str]]:
    """Yield the names grouped by decoder layer; a tensor outside the layers is a group of its own."""
    groups: dict[str, list[str]] = {}
    for name in names:
        match = LAYER.match(name)
        groups.setdefault(match.group() if match else name, []).append(name)
    yield from groups.values()


def _merged(hf: torch.nn.Module, name: str, tensors: dict[str, Tensor]) -> Tensor:
    """Return the weight `name` with its adapter merged, if it has one."""
    weight = dequantized(tensors[name])
    owner, leaf = name.rpartition(".")[::2]
    while owner.endswith(".base_layer"):
        owner = owner.removesuffix(".base_layer")
        layer: Any = hf.get_submodule(owner)  # a layer of peft's
        if getattr(layer, "parameter_name", "weight") == leaf:  # each matrix of a stack of experts has its own adapter
            down, up = (tensors[f"{owner}.{part}.{ADAPTER}.weight"] for part in ("lora_A", "lora_B"))
            if getattr(layer.get_base_layer(), "is_transposed", False):  # experts [E, in, out]
                return merged_weight(weight.mT, down, up, layer.scaling[ADAPTER]).mT.contiguous()
            return merged_weight(weight, down, up, layer.scaling[ADAPTER])
    return weight


def write_weights(weights: dict[str, Tensor], folder: Path) -> None:
    """Write safetensors shards of at most 5 GB, with an index if there are several."""
    split = split_torch_state_dict_into_shards(
        weights, filename_pattern="model{suffix}.safetensors", max_shard_size=SHARD_BYTES
    )
    for file, names in split.filename_to_tensors.items():
        save_file({name: weights[name] for name in names}, folder / file, metadata={"format": "pt"})
    if split.is_sharded:
        index = {"metadata": split.metadata, "weight_map": split.tensor_to_filename}
        (folder / INDEX).write_text(json.dumps(index, indent=1))
