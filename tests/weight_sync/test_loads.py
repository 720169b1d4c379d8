"""Where a model's own loaders put the tensors of a checkpoint is recorded, and read there again."""

from __future__ import annotations

import os
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn
from vllm._custom_ops import causal_conv1d_weight_pack
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.distributed import parallel_state
from vllm.model_executor.layers import linear, vocab_parallel_embedding

from rlhf_suite.weight_sync.digests import TensorEntry, difference, digest
from rlhf_suite.weight_sync.loads import Loads
from rlhf_suite.weight_sync.read_back import ReadBack, packed_order, read_back, unpack_convolution, unpack_experts

HEAD, WIDTH, INNER = 4, 8, 12
ROWS = {"q": 4 * HEAD, "k": 2 * HEAD, "v": 2 * HEAD}
VOCABULARY = 70  # it ends in the middle of the rows of a worker


def entry_of(name: str, tensor: Tensor) -> TensorEntry:
    return TensorEntry(name, tuple(tensor.shape), "float32", 0, tensor.nbytes, digest(tensor))


def wrong_in(reading: ReadBack) -> str | None:
    return difference("", reading.place.entry, digest(reading.values))


class Model(nn.Module):
    """A model whose loader is one function; its parameters have no memory while it is loaded, as in vLLM."""

    def __init__(self, parameters: dict[str, tuple[int, ...]], load: Callable[[Any, str, Tensor], None]) -> None:
        super().__init__()
        self.layer = nn.Module()
        self._load = load
        for name, shape in parameters.items():
            self.layer.register_parameter(name, nn.Parameter(torch.empty(shape, device="meta"), requires_grad=False))

    def sync(self, weights: dict[str, Tensor]) -> Loads:
        """Load twice, as vLLM does: without memory, and then into it."""
        loads = Loads(self)
        with loads, torch.no_grad():
            for name, tensor in loads.watch([entry_of(*each) for each in weights.items()], list(weights.values())):
                self._load(self.layer, name, tensor)
        for name, parameter in list(self.layer.named_parameters()):
            memory = torch.zeros(parameter.shape) if parameter.is_meta else parameter
            self.layer.register_parameter(name, nn.Parameter(memory, requires_grad=False))
        with torch.no_grad():
            for name, tensor in weights.items():
                self._load(self.layer, name, tensor)
        return loads

    def readings(self, loads: Loads) -> list[ReadBack]:
        """What is read back, of which nothing is wrong."""
        found = list(read_back(self, loads))
        assert [wrong_in(each) for each in found] == [None] * len(found)
        return found


def numbers(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(len(shape) + sum(shape)))


def transposed(layer: Any, name: str, tensor: Tensor) -> None:
    """A checkpoint of modules of the Conv1D kind, which are [in, out]."""
    layer.weight.copy_(tensor.t())


def reordered(layer: Any, name: str, tensor: Tensor) -> None:
    """q, k and v of each head side by side, as in bloom: what is copied is no view of the tensor."""
    layer.weight.copy_(tensor.view(2, 3, 2, 4).transpose(0, 1).reshape(12, 4))


def fused(layer: Any, name: str, tensor: Tensor) -> None:
    """gate and up in one parameter."""
    start = {"layer.gate": 0, "layer.up": 6}[name]
    layer.weight.narrow(0, start, 6).copy_(tensor)


def stacked(layer: Any, name: str, tensor: Tensor) -> None:
    """The matrices of experts in one parameter, each [in, out]."""
    layer.weight.data[int(name[-1])].copy_(tensor.t())


@pytest.mark.notices(
    "each part of a fused parameter is looked for at its beginning",
    "weight_sync/loads.py",
    "values.storage_offset() + self.offset",
    "values.storage_offset()",
)
@pytest.mark.notices(
    "a reordered tensor has the digest of the one that arrived",
    "weight_sync/loads.py",
    "is_whole = source.data_ptr() == whole.data_ptr() and source.shape == whole.shape",
    "is_whole = source.shape == whole.shape",
)
@pytest.mark.notices(
    "a square matrix that is loaded transposed has the digest of the one that arrived",
    "weight_sync/loads.py",
    "is_whole and source.is_contiguous() and target.dtype",
    "is_whole and target.dtype",
)
@pytest.mark.parametrize(
    ("shape", "load", "weights"),
    [
        ((5, 3), transposed, {"layer.weight": numbers(3, 5)}),
        ((4, 4), transposed, {"layer.weight": numbers(4, 4)}),
        ((12, 4), reordered, {"layer.weight": numbers(12, 4)}),
        ((12, 4), fused, {"layer.gate": numbers(6, 4), "layer.up": numbers(6, 4) + 1}),
        ((2, 5, 3), stacked, {"layer.expert0": numbers(3, 5), "layer.expert1": numbers(3, 5) + 1}),
    ],
    ids=["transposed", "transposed, square", "reordered", "fused", "stacked experts"],
)
def test_whatever_a_loader_makes_of_a_tensor_is_read_where_it_put_it(shape, load, weights):
    model = Model({"weight": shape}, load)
    loads = model.sync(weights)
    assert {each.place.entry.name for each in model.readings(loads)} == weights.keys()
    assert loads.placed == loads.sizes == {name: tensor.numel() for name, tensor in weights.items()}
    for name in weights:
        place = next(each for each in read_back(model, loads) if each.place.entry.name == name)
        place.values[(1,) * place.values.dim()] += 1e-3  # a view of the parameter
        wrong = [wrong_in(each) for each in read_back(model, loads)]
        assert [bool(text) and f"tensor {name} " in text for text in wrong].count(True) == 1
        place.values[(1,) * place.values.dim()] -= 1e-3


@pytest.mark.notices(
    "what a loader has computed from a tensor must be the tensor",
    "weight_sync/loads.py",
    "        if source.is_meta:\n            place.is_computed = True\n            return\n",
    "        if source.is_meta:\n            return\n",
)
def test_what_a_loader_computes_in_the_parameter_is_not_compared():
    """The decay of a Mamba layer: -exp(A_log)."""

    def composed(layer: Any, name: str, tensor: Tensor) -> None:
        layer.weight.copy_(tensor)
        layer.weight.copy_(-layer.weight.exp())

    def in_place(layer: Any, name: str, tensor: Tensor) -> None:
        layer.weight.copy_(tensor)
        layer.weight.add_(1)

    for load in (composed, in_place):
        model = Model({"weight": (5,)}, load)
        assert model.readings(model.sync({"layer.weight": numbers(5)})) == []


@pytest.mark.notices(
    "what a loader has computed is never compared, although it was seen",
    "weight_sync/loads.py",
    "                place.is_computed = False\n",
    "                pass\n",
)
def test_what_a_loader_computes_is_compared_where_it_was_seen_to_compute_it():
    """vLLM loads a layer while its last tensor arrives: what -exp(A_log) is, is known then."""

    def composed(layer: Any, name: str, tensor: Tensor) -> None:
        layer.decay.copy_(tensor)
        layer.decay.copy_(-layer.decay.exp())

    model, weights = Model({"decay": (5,)}, composed), {"layer.decay": numbers(5)}
    loads = Loads(model)
    with loads, torch.no_grad():
        for name, tensor in loads.watch([entry_of(*each) for each in weights.items()], list(weights.values())):
            composed(model.layer, name, tensor)
            model.layer.decay = nn.Parameter(torch.zeros(5), requires_grad=False)
            composed(model.layer, name, tensor)
    (reading,) = model.readings(loads)
    assert torch.equal(reading.values, -weights["layer.decay"].exp())
    model.layer.decay[3] += 1e-3
    assert "tensor layer.decay " in str([wrong_in(each) for each in read_back(model, loads)])


def test_copies_that_fill_a_parameter_without_memory_are_told_to_the_caller():
    filled = list[tuple[str, Tensor]]()
    model = Model({"whole": (4,), "halves": (4,)}, lambda *arguments: None)
    loads = Loads(model, lambda target, source: filled.append((target.leaf, source)))
    whole, half = numbers(4), numbers(2)
    with loads, torch.no_grad():
        for name, tensor in loads.watch([entry_of("whole", whole), entry_of("half", half)], [whole, half]):
            (model.layer.whole if name == "whole" else model.layer.halves[:2]).copy_(tensor)
    assert [leaf for leaf, _ in filled] == ["whole"] and torch.equal(filled[0][1], whole)


@pytest.mark.skipif(not hasattr(torch.ops._C, "causal_conv1d_weight_pack"), reason="vLLM has no such kernel here")
def test_packed_convolutions_are_unpacked():
    weights = numbers(64, 4).to(torch.bfloat16)
    packed = causal_conv1d_weight_pack(weights)
    assert torch.equal(unpack_convolution(packed), weights)


def test_a_loader_of_one_number_fills_it_in():
    model = Model({"gate": (1,)}, lambda layer, name, tensor: layer.gate.fill_(tensor.item()))
    assert len(model.readings(model.sync({"layer.gate": torch.tensor(0.25)}))) == 1


@pytest.mark.notices(
    "a parameter that the engine keeps in fewer bits is compared all the same",
    "weight_sync/read_back.py",
    "value.element_size() >= like.element_size()",
    "value.element_size() > 0",
)
def test_a_parameter_of_fewer_bits_is_not_compared():
    model = Model({"weight": (5,)}, lambda layer, name, tensor: layer.weight.copy_(tensor))
    loads = model.sync({"layer.weight": numbers(5)})
    model.layer.weight = nn.Parameter(model.layer.weight.to(torch.bfloat16), requires_grad=False)
    assert list(read_back(model, loads)) == []


@pytest.mark.notices(
    "a bias that the model made while it was loaded is lost with vLLM's reload",
    "weight_sync/loads.py",
    "is None and not target.like.is_meta:",
    "is None and target.like.is_meta:",
)
def test_a_bias_that_the_model_makes_while_it_loads_is_known_and_lasts():
    """vLLM's reload removes what was not there before."""

    def load(layer: Any, name: str, tensor: Tensor) -> None:
        if getattr(layer, "bias", None) is None:
            layer.register_parameter("bias", nn.Parameter(torch.empty(5), requires_grad=False))
        layer.bias.copy_(tensor)

    model, weights = Model({}, load), {"layer.bias": numbers(5)}
    loads = model.sync(weights)
    del model.layer.bias
    loads.finish()
    assert torch.equal(model.layer.bias, weights["layer.bias"])
    assert len(model.readings(loads)) == 1


@pytest.mark.notices(
    "a bias that is loaded once more with its layer is taken for the newest tensor",
    "weight_sync/loads.py",
    "(earlier.entry if earlier else self._newest[0])",
    "self._newest[0]",
)
def test_a_bias_that_is_loaded_once_more_with_its_layer_stays_the_tensor_that_it_was():
    """vLLM loads a bias when it arrives, and again after the last tensor of its layer; here a copy of it in an order
    of its own."""
    late: list[Tensor] = []

    def load(layer: Any, name: str, tensor: Tensor) -> None:
        if name == "layer.bias":
            late.append(tensor.view(2, 3).t().reshape(6))
        else:
            layer.weight.copy_(tensor)
        layer.bias.copy_(late[0])

    model = Model({"weight": (6, 3)}, load)
    model.layer.bias = nn.Parameter(torch.zeros(6), requires_grad=False)
    loads = model.sync({"layer.bias": numbers(6), "layer.weight": numbers(6, 3)})
    assert {each.where: each.place.entry.name for each in model.readings(loads)} == {
        name: name for name in ("layer.bias", "layer.weight")
    }


@pytest.mark.notices(
    "a tensor that the engine's model drops is not noticed",
    "weight_sync/loads.py",
    'if (other := taken.get(name.rpartition(".")[0])) is not None:',
    "if (other := taken.get(name)) is not None:",
)
def test_a_tensor_that_the_model_drops_from_a_layer_is_named():
    def load(layer: Any, name: str, tensor: Tensor) -> None:
        if name == "layer.weight":
            layer.weight.copy_(tensor)

    model = Model({"weight": (5, 3)}, load)
    weights = {"layer.weight": numbers(5, 3), "layer.bias": numbers(5)}
    expected = "tensor layer.bias has no place in vLLM's Model, which has layer.weight of the same layer"
    assert expected in (model.sync(weights).without_place() or "")
    tower = {"layer.weight": numbers(5, 3), "tower.weight": numbers(5)}
    assert Model({"weight": (5, 3)}, load).sync(tower).without_place() is None


def test_a_head_of_its_own_that_the_model_takes_from_the_embedding_is_named():
    """An adapter that changes only one of them unties them in the trainer."""

    def load(layer: Any, name: str, tensor: Tensor) -> None:
        if name == "layer.weight":
            layer.weight.copy_(tensor)

    sent = {"layer.weight": numbers(5, 3), "lm_head.weight": numbers(5, 3)}
    found = Model({"weight": (5, 3)}, load).sync(sent).without_place() or ""
    assert "tensor lm_head.weight has no place in vLLM's Model, whose head is its embedding" in found
    assert "leave both out of ds.lora.target_modules" in found


@pytest.mark.notices(
    "the head of an engine is its embedding although the policy has two",
    "weight_sync/loads.py",
    "if there != place.entry.name:",
    "if there is None:",
)
@pytest.mark.parametrize("difference", [0, 1])
def test_two_tensors_of_one_parameter_are_refused(difference):
    """vLLM may load a tied head into the embedding, which is then lost; in the first sync the two may be equal yet."""

    def load(layer: Any, name: str, tensor: Tensor) -> None:
        parameter = layer.weight if name == "layer.weight" else layer.head
        parameter.copy_(tensor)

    model = Model({"weight": (5, 3), "head": (5, 3)}, load)
    loads = model.sync({"layer.weight": numbers(5, 3), "lm_head.weight": numbers(5, 3) + difference})
    assert loads.without_place() is None
    model.layer.head = model.layer.weight
    found = loads.without_place() or ""
    assert "lm_head.weight has no place in vLLM's Model, which has layer.weight there" in found


@pytest.mark.notices(
    "an engine keeps all weights that have arrived",
    "weight_sync/loads.py",
    "target.leaf, target.like)\n        self._let_go()\n",
    "target.leaf, target.like)\n",
)
def test_no_tensor_that_has_arrived_is_kept():
    model = Model({"weight": (5,)}, lambda layer, name, tensor: layer.weight.copy_(tensor))
    weights = {"layer.weight": numbers(5)}
    loads = model.sync(weights)
    loads.finish()
    assert not any(value is weights["layer.weight"] for value in torch_values(vars(loads)))


def torch_values(held: Any) -> list[Any]:
    if isinstance(held, dict):
        return [each for value in held.values() for each in torch_values(value)]
    return [each for value in held for each in torch_values(value)] if isinstance(held, list | tuple) else [held]


@pytest.mark.notices(
    "a packed matrix is read back by the number of its outputs",
    "weight_sync/read_back.py",
    "torch.eye(like.shape[1]",
    "torch.eye(like.shape[0]",
)
@pytest.mark.notices(
    "the packed copy in a tied head is not read back",
    "weight_sync/read_back.py",
    "in held.get(id(value), ()):",
    "in [(target.path, target.module, target.leaf)]:",
)
@pytest.mark.parametrize("tied", [False, True])
def test_a_packed_matrix_is_read_by_the_width_that_it_was_packed_with(tied):
    """A kernel does not check the width of its input: that of a tensor [in, out] would read and write other memory."""
    model, weights = Model({"weight": (5, 3)}, transposed), {"layer.weight": numbers(3, 5)}
    loads = model.sync(weights)
    packed = model.layer.weight.detach().clone()

    def kernel(rows: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        assert rows.shape[1] == packed.shape[1], "it would crash"
        return rows @ packed.t()

    if tied:
        model.head = nn.Module()
        model.head.weight, model.head.cpu_linear = model.layer.weight, kernel
    else:
        model.layer.cpu_linear = kernel
        model.layer.weight = nn.Parameter(torch.empty(0), requires_grad=False)
    where = ["layer.weight", "head.weight", "head.weight (packed)"] if tied else ["layer.weight (packed)"]
    assert [each.where for each in model.readings(loads)] == where
    packed[4, 1] += 1e-3
    assert sum(wrong_in(each) is not None for each in read_back(model, loads)) == 1


@pytest.mark.notices(
    "the padding of packed experts is taken for their rows",
    "weight_sync/read_back.py",
    "half[:, : like.shape[1] // 2]",
    "half[:, : half.shape[1]]",
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_padded_and_packed_experts_are_unpacked(dtype):
    from vllm._custom_ops import cpu_prepack_moe_weight

    gate, up, down = (numbers(2, 3, 32).to(dtype), numbers(2, 3, 32).to(dtype) + 1, numbers(2, 32, 3).to(dtype))
    padded = [torch.nn.functional.pad(each, (0, 0, 0, 29)) for each in (gate, up)]
    layer = nn.Module()
    layer.w13_weight = nn.Parameter(cpu_prepack_moe_weight(torch.cat(padded, 1), "vec"), requires_grad=False)
    layer.w2_weight = nn.Parameter(
        cpu_prepack_moe_weight(torch.nn.functional.pad(down, (0, 29)), "vec"), requires_grad=False
    )
    layer.quant_method = SimpleNamespace(moe_kernel=SimpleNamespace(fused_experts=SimpleNamespace(isa="vec")))
    assert torch.equal(unpack_experts(layer, "w13_weight", torch.cat([gate, up], 1)), torch.cat([gate, up], 1))
    assert torch.equal(unpack_experts(layer, "w2_weight", down), down)
    assert sorted(packed_order((64, 32), dtype, "vec").tolist()) == list(range(64 * 32))


class Layers(nn.Module):
    """One layer of each kind, as vLLM's models have them, on one of the workers of an engine."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = vocab_parallel_embedding.VocabParallelEmbedding(VOCABULARY, WIDTH)
        self.qkv = linear.QKVParallelLinear(WIDTH, HEAD, 4, 2, bias=True)
        self.out = linear.RowParallelLinear(4 * HEAD, WIDTH, bias=True)
        self.gate_up = linear.MergedColumnParallelLinear(WIDTH, [INNER, INNER], bias=False)
        self.up = linear.ColumnParallelLinear(WIDTH, INNER, bias=True)


# For each tensor of a checkpoint: the parameter that it is a part of, and vLLM's name of this part.
TENSORS: dict[str, tuple[Tensor, str, tuple[Any, ...]]] = {
    "embed.weight": (numbers(VOCABULARY, WIDTH), "embed.weight", ()),
    **{f"{part}.weight": (numbers(rows, WIDTH), "qkv.weight", (part,)) for part, rows in ROWS.items()},
    **{f"{part}.bias": (numbers(rows), "qkv.bias", (part,)) for part, rows in ROWS.items()},
    "qkv.weight": (numbers(sum(ROWS.values()), WIDTH), "qkv.weight", ()),
    "out.weight": (numbers(WIDTH, 4 * HEAD), "out.weight", ()),
    "out.bias": (numbers(WIDTH), "out.bias", ()),
    "gate.weight": (numbers(INNER, WIDTH), "gate_up.weight", (0,)),
    "up_half.weight": (numbers(INNER, WIDTH) + 1, "gate_up.weight", (1,)),
    "up.weight": (numbers(INNER, WIDTH) + 2, "up.weight", ()),
    "up.bias": (numbers(INNER), "up.bias", ()),
}


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("name", TENSORS)
def test_the_workers_of_a_split_engine_know_their_parts(monkeypatch, name, size):
    """With four workers, two hold the same key/value head. Together they have the whole tensor."""
    tensor, path, shard = TENSORS[name]
    placed = []
    for rank in range(size):
        monkeypatch.setattr(parallel_state, "_TP", SimpleNamespace(world_size=size, rank_in_group=rank))
        with patch.dict(os.environ), set_current_vllm_config(VllmConfig()):  # it sets LD_PRELOAD and others
            model = Layers()
        loads, parameter = Loads(model), model.get_parameter(path)
        with loads:
            for _, arrived in loads.watch([entry_of(name, tensor)], [tensor]):
                parameter.weight_loader(parameter, arrived, *shard)
        readings = list(read_back(model, loads))
        assert [wrong_in(each) for each in readings] == [None] * len(readings)
        assert {each.where for each in readings} == {path}
        assert all(torch.isin(each.values, tensor).all() for each in readings)
        assert sum(each.values.numel() for each in readings) == loads.placed[name]
        placed.append(loads.placed[name])
    replicas = 2 if size == 4 and shard in (("k",), ("v",)) else size if name == "out.bias" else 1
    assert sum(placed) == tensor.numel() * replicas or name == "qkv.weight"
