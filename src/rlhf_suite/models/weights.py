"""The weights of a model under their names in checkpoints: read one layer at a time, and written as
safetensors shards."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import split_torch_state_dict_into_shards
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion

from rlhf_suite.models.families import family_of
from rlhf_suite.models.forward import LanguageModel, ScalarModel
from rlhf_suite.models.lora import base_of, find_adapted, list_stored, merge_tensors, parents
from rlhf_suite.models.quantize import STATE, dequantize
from rlhf_suite.waits import sign_of_life

LAYER = re.compile(r"^.*?\.\d+(?=\.)")  # model.layers.7
INDEX = "model.safetensors.index.json"
SHARD_BYTES = 5 * 10**9

Values = Callable[[Tensor], Tensor]
Gather = Callable[[Sequence[Tensor]], AbstractContextManager[Any]]


def whole(parameters: Sequence[Tensor]) -> AbstractContextManager[Any]:
    """Gather parameters that are not partitioned: do nothing."""
    return nullcontext()


@dataclass(frozen=True)
class Piece:
    """What tensors of a checkpoint are computed from: a tensor of the model, or an adapter with what it wraps."""

    name: str  # of the tensor, or of the module that the adapter stands for
    tensors: tuple[Tensor, ...]
    adapter: nn.Module | None = None

    def values(self, exact: Values, plain: Values) -> dict[str, Tensor]:
        """Return tensors by their names in a model without adapters. Adapters are merged in the numbers that `exact`
        gives and rounded once; `plain` gives the numbers of a tensor without adapter."""
        if self.adapter is None:
            return {self.name: plain(self.tensors[0])}
        types = {name: dtype_of(tensor) for name, tensor in list_stored(base_of(self.adapter))}
        merged = merge_tensors(self.adapter, exact)
        return {f"{self.name}.{name}": tensor.to(types[name]) for name, tensor in merged.items()}

    def base_values(self, plain: Values) -> dict[str, Tensor]:
        """Return tensors by their names in a model without adapters, as if there were none."""
        if self.adapter is None:
            return {self.name: plain(self.tensors[0])}
        return {f"{self.name}.{name}": plain(tensor) for name, tensor in list_stored(base_of(self.adapter))}

    @property
    def memory(self) -> frozenset[tuple[int, ...]]:
        """Return where its tensors lie. A transposed view lies where its tensor does, which partitioned tensors have
        not."""
        return frozenset((t.data_ptr(), t.numel()) if t.numel() and not t.is_meta else (id(t),) for t in self.tensors)


def pieces(model: nn.Module) -> list[Piece]:
    """Return the pieces of a model, each once: a tied head repeats the embedding, unless an adapter changes only one
    of them."""
    adapters = find_adapted(model)
    grouped: dict[str, list[Tensor]] = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        if not STATE.search(name):
            grouped.setdefault(next((parent for parent in parents(name) if parent in adapters), name), []).append(
                tensor
            )
    grouped_pieces = [Piece(name, tuple(tensors), adapters.get(name)) for name, tensors in grouped.items()]
    first = {piece.memory: piece for piece in reversed(grouped_pieces)}
    return [piece for piece in grouped_pieces if first[piece.memory] is piece]


def find_changed_ties(model: nn.Module) -> list[str]:
    """Return the pieces that share a tensor with an earlier one, of which an adapter has made another matrix."""
    seen: set[tuple[int, ...]] = set()
    changed = []
    for piece in pieces(model):
        if seen & piece.memory:
            changed.append(piece.name)
        seen |= piece.memory
    return changed


@torch.no_grad()
def iterate_weights(
    model: LanguageModel | ScalarModel, gather: Gather = whole, *, merges: bool = True
) -> Iterator[tuple[str, Tensor]]:
    """Yield (checkpoint name, tensor) of every weight, dequantised, with adapters merged (`merges`) or left out, and
    without tied heads.

    `gather` makes parameters whole that ZeRO-3 partitions. It is entered for one layer at a time and on every rank in
    the same order, so every rank must iterate to the end. A tensor may be the parameter itself, and it is whole only
    until the next one is requested: copy it to keep it.
    """
    for name, tensor in iterate_merged(model.model, gather, merges=merges):
        sign_of_life()
        yield checkpoint_name(model, name), tensor


@torch.no_grad()
def iterate_merged(
    model: PreTrainedModel, gather: Gather = whole, *, merges: bool = True
) -> Iterator[tuple[str, Tensor]]:
    """Yield as `iterate_weights` does, for a model of transformers."""
    turned = family_of(model.config.to_dict()).transposed  # transformers 5 reads these in both forms, and others do not
    for group in _layers(pieces(model)):
        with gather([tensor for piece in group for tensor in piece.tensors]):
            layer: dict[str, Tensor] = {}
            for piece in group:
                layer |= piece.values(in_full, dequantize) if merges else piece.base_values(dequantize)
            for name, tensor in revert_weight_conversion(model, layer).items():
                is_turned = bool(turned) and name.endswith(turned)
                yield name, (tensor.transpose(1, 2).contiguous() if is_turned else tensor).detach()


@torch.no_grad()
def weight_shapes(model: PreTrainedModel) -> dict[str, list[int]]:
    """Return the shapes of the tensors that `iterate_weights` makes, by their names in a model without adapters.

    They are computed without their values, by the same steps.

    Raises whatever those steps raise.
    """
    weights: dict[str, Tensor] = {}
    for group in _layers(pieces(model)):
        layer: dict[str, Tensor] = {}
        for piece in group:
            layer |= piece.values(without_values, without_values)
        revert_weight_conversion(model, layer)
        weights |= layer
    return {name: list(tensor.shape) for name, tensor in weights.items()}


def weights_on_cpu(model: LanguageModel | ScalarModel, gather: Gather = whole, keep: bool = True) -> dict[str, Tensor]:
    """Return all of `iterate_weights` as copies in host memory; an empty dict on ranks that only take part (`keep`
    false)."""
    copies = {}
    for name, tensor in iterate_weights(model, gather):
        if keep:
            copies[name] = tensor.to("cpu", copy=True).contiguous()
    return copies


def checkpoint_name(model: LanguageModel | ScalarModel, name: str) -> str:
    """Return `name`, with the scalar head named by `ds.value_head_prefix`."""
    if isinstance(model, ScalarModel) and name.startswith("score."):
        return model.head_name + name.removeprefix("score")
    return name


def in_full(tensor: Tensor) -> Tensor:
    """Return a copy of the numbers of a tensor, in fp32 or more."""
    numbers = dequantize(tensor).detach()
    return numbers.to(torch.promote_types(numbers.dtype, torch.float32), copy=True)


def without_values(tensor: Tensor) -> Tensor:
    """Return a tensor of the same shape and type that has no memory, also for one that is packed or partitioned."""
    state = getattr(tensor, "quant_state", None)
    shape = state.shape if state is not None else getattr(tensor, "ds_shape", tensor.shape)
    return torch.empty(tuple(shape), dtype=dtype_of(tensor), device="meta")


def dtype_of(tensor: Tensor) -> torch.dtype:
    """Return the type of the numbers that a tensor stands for."""
    state = getattr(tensor, "quant_state", None)
    return tensor.dtype if state is None else state.dtype


def _layers(model_pieces: Sequence[Piece]) -> Iterator[list[Piece]]:
    """Yield the pieces grouped by decoder layer; one outside the layers is a group of its own."""
    groups: dict[str, list[Piece]] = {}
    for piece in model_pieces:
        match = LAYER.match(f"{piece.name}.")
        groups.setdefault(match.group() if match else piece.name, []).append(piece)
    yield from groups.values()


def write_weights(weights: dict[str, Tensor], folder: Path) -> None:
    """Write safetensors shards of at most 5 GB, with an index if there are several."""
    split = split_torch_state_dict_into_shards(
        weights, filename_pattern="model{suffix}.safetensors", max_shard_size=SHARD_BYTES
    )
    for file, names in split.filename_to_tensors.items():
        save_file({name: weights[name] for name in names}, folder / file, metadata={"format": "pt"})
    if split.is_sharded:
        index = {"metadata": split.metadata, "weight_map": split.tensor_to_filename}
        (folder / INDEX).write_text(json.dumps(index, indent=1), encoding="utf-8")
