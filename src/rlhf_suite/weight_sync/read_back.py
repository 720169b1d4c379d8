"""Reading the weights back from a vLLM model, tensor by tensor under their names in the checkpoint.

This is the second half of the verification. vLLM fuses some tensors of a checkpoint (q, k and v into one matrix), pads
vocabularies, and on the CPU keeps matrices inside packed kernels. A packed [N, K] matrix is read back by multiplying it
with the [K, K] identity, which costs as much as a forward pass over K tokens. What cannot be read back (experts) is
checked only by the log-prob probe.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from rlhf_suite.weight_sync.digests import TensorEntry, WeightSyncError

IDENTITY_ROWS = 512  # rows of the identity that are multiplied at a time


@dataclass(frozen=True)
class ReadBack:
    """The values of the tensor `entry` at one place of the model."""

    entry: TensorEntry
    place: str
    values: torch.Tensor  # of the entry's shape


@dataclass(frozen=True)
class Place:
    """Where a vLLM model has a tensor of the checkpoint."""

    name: str  # of the tensor, by the names of vLLM but before the fusion
    module: nn.Module
    path: str  # of the module
    leaf: str  # the name of its parameter
    part: str  # the name of the module in the checkpoint, e.g. k_proj
    siblings: Sequence[str]  # the parts that are fused in this module, in the order of their rows

    @property
    def is_whole(self) -> bool:
        """Whether the checkpoint has all of the module's rows in one tensor."""
        return len(self.siblings) == 1


class ModelReader:
    """Reads the weights of one vLLM model. `expected`: the tensors that the model, or this worker's part of it, must
    have.

    It keeps the matrix that it unpacked last, since the parts of a fused matrix are read one after the other.
    """

    def __init__(self, model: nn.Module, expected: Mapping[str, TensorEntry]) -> None:
        self._model, self._expected = model, expected
        mapping: Mapping[str, list[str]] = getattr(model, "packed_modules_mapping", {})
        # For each fused part, e.g. k_proj: the name of the fused module and all its parts in the order of their rows.
        self._fused = {part: (whole, parts) for whole, parts in mapping.items() for part in parts}
        self._unpacked: tuple[nn.Module | None, torch.Tensor] = (None, torch.empty(0))

    def read_back(self) -> Iterator[ReadBack]:
        """Yield the values at every place that can be read back.

        A tensor with two places (an embedding and the packed copy in its tied head) occurs twice.

        Raises:
            WeightSyncError: vLLM's model has no place for a bias, so it computes something else.
        """
        for entry in self._expected.values():
            yield from self._find(entry)
        yield from self._tied_head()

    def place(self, name: str) -> Place | None:
        """Return where the model has the tensor `name` of the checkpoint; None if it has no such module."""
        inner = _inner_name(self._model, name)
        path, leaf = inner.rpartition(".")[::2]
        parent, part = path.rpartition(".")[::2]
        whole, siblings = self._fused.get(part, (part, [part]))
        module_path = f"{parent}.{whole}" if parent else whole
        module = _module(self._model, module_path)
        return None if module is None else Place(inner, module, module_path, leaf, part, siblings)

    def _find(self, entry: TensorEntry) -> Iterator[ReadBack]:
        """Yield the values of one tensor at its places."""
        place = self.place(entry.name)
        if place is None or not entry.shape:
            return
        module, leaf, part = place.module, place.leaf, place.part
        if leaf == "bias" and hasattr(module, "weight") and getattr(module, "bias", None) is None:
            # vLLM's loaders skip such a tensor silently.
            raise WeightSyncError(
                f"tensor {entry.name} has no place in vLLM's {type(self._model).__name__}: its {place.path} has no "
                "bias, so it would sample from another model than the one trained"
            )
        earlier = place.siblings[: place.siblings.index(part)]
        before = [entry.name.replace(f".{part}.", f".{other}.") for other in earlier]
        start = sum(self._expected[name].shape[0] for name in before)
        for kind, values in self._places(module, leaf, entry):
            rows = values[start : start + entry.shape[0]]
            if rows.shape == entry.shape:
                yield ReadBack(entry, f"{place.name}{kind}", rows)

    def _tied_head(self) -> Iterator[ReadBack]:
        """Yield the values of a head that the checkpoint does not have: they must equal the embedding."""
        head = _module(self._model, "lm_head")
        names = [name for name in self._expected if name.endswith("embed_tokens.weight")]
        if head is None or not names or "lm_head.weight" in self._expected:
            return
        entry = self._expected[names[0]]
        for place, values in self._places(head, "weight", entry):
            yield ReadBack(entry, f"lm_head.weight{place}", values[: entry.shape[0]])

    def _places(self, module: nn.Module, leaf: str, entry: TensorEntry) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield (place, values) for the parameter `leaf` of a module: its tensor and the packed copy
        in its CPU kernel."""
        value = getattr(module, leaf, None)
        if isinstance(value, torch.Tensor) and value.numel() > 0:
            yield "", value.detach()
        if leaf == "weight" and hasattr(module, "cpu_linear"):
            if self._unpacked[0] is not module:
                self._unpacked = module, unpack(module, entry.shape[-1], getattr(torch, entry.dtype))
            yield " (packed)", self._unpacked[1]


def unpack(module: nn.Module, width: int, dtype: torch.dtype) -> torch.Tensor:
    """Return the [N, width] matrix inside a CPU kernel. This is exact: each sum of products has one
    term that is not 0."""
    kernel: Any = module.cpu_linear
    identity = torch.eye(width, dtype=dtype)
    return torch.cat([kernel(rows, module.weight, None) for rows in identity.split(IDENTITY_ROWS)]).t().contiguous()


def _inner_name(model: nn.Module, name: str) -> str:
    """Return the name that a checkpoint's tensor has in the vLLM model."""
    mapper = getattr(model, "hf_to_vllm_mapper", None)
    prefixes = getattr(mapper, "orig_to_new_prefix", {})
    for old, new in prefixes.items():
        if new is not None and name.startswith(old):
            return new + name.removeprefix(old)
    return name


def _module(model: nn.Module, path: str) -> nn.Module | None:
    """Return a submodule, or None if there is none of that name."""
    try:
        return model.get_submodule(path)
    except AttributeError:
        return None
