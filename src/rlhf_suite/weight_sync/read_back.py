"""Reading back what a vLLM model holds, tensor by tensor in the checkpoint's names: the second half of the attestation.

vLLM fuses some of a checkpoint's tensors (q, k and v into one matrix), pads vocabularies, and on the CPU hides
matrices inside packed kernels. A packed [N, K] matrix is read back by multiplying it with the [K, K] identity, which
costs what a forward pass over K tokens costs. What cannot be read back (experts, sharded models) is left to the
log-prob probe.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from rlhf_suite.weight_sync.digests import TensorEntry, WeightSyncError

IDENTITY_ROWS = 512  # multiplied at a time


@dataclass(frozen=True)
class ReadBack:
    """One place where the model holds the tensor `entry`."""

    entry: TensorEntry
    place: str
    values: torch.Tensor  # of the entry's shape


class ModelReader:
    """Reads one vLLM model. It keeps the matrix it unpacked last: the parts of a fused one are asked for in turn."""

    def __init__(self, model: nn.Module, expected: Mapping[str, TensorEntry]) -> None:
        self._model, self._expected = model, expected
        mapping: Mapping[str, list[str]] = getattr(model, "packed_modules_mapping", {})
        # Of each fused part, e.g. k_proj: the fused module's name and all its parts in the order of their rows.
        self._fused = {part: (whole, parts) for whole, parts in mapping.items() for part in parts}
        self._unpacked: tuple[nn.Module | None, torch.Tensor] = (None, torch.empty(0))

    def read_back(self) -> Iterator[ReadBack]:
        """Every place that can be read back; a tensor with two (an embedding and its tied head's packed copy) comes
        twice.

        Raises:
            WeightSyncError: vLLM's model has no place for a bias, and so computes something else.
        """
        for entry in self._expected.values():
            yield from self._find(entry)
        yield from self._tied_head()

    def _find(self, entry: TensorEntry) -> Iterator[ReadBack]:
        path, leaf = _inner_name(self._model, entry.name).rpartition(".")[::2]
        parent, part = path.rpartition(".")[::2]
        whole, siblings = self._fused.get(part, (part, [part]))
        module_path = f"{parent}.{whole}" if parent else whole
        module = _module(self._model, module_path)
        if module is None or not entry.shape:
            return
        if leaf == "bias" and hasattr(module, "weight") and getattr(module, "bias", None) is None:
            # vLLM's loaders skip such a tensor without a word.
            raise WeightSyncError(
                f"tensor {entry.name} has no place in vLLM's {type(self._model).__name__}: its {module_path} has no "
                "bias, so it would sample from another model than the one trained"
            )
        before = [entry.name.replace(f".{part}.", f".{other}.") for other in siblings[: siblings.index(part)]]
        start = sum(self._expected[name].shape[0] for name in before)
        for place, values in self._places(module, leaf, entry):
            rows = values[start : start + entry.shape[0]]
            if rows.shape == entry.shape:
                yield ReadBack(entry, f"{path}.{leaf}{place}", rows)

    def _tied_head(self) -> Iterator[ReadBack]:
        """The head of a model whose checkpoint has none of its own: it must hold the embedding."""
        head = _module(self._model, "lm_head")
        names = [name for name in self._expected if name.endswith("embed_tokens.weight")]
        if head is None or not names or "lm_head.weight" in self._expected:
            return
        entry = self._expected[names[0]]
        for place, values in self._places(head, "weight", entry):
            yield ReadBack(entry, f"lm_head.weight{place}", values[: entry.shape[0]])

    def _places(self, module: nn.Module, leaf: str, entry: TensorEntry) -> Iterator[tuple[str, torch.Tensor]]:
        value = getattr(module, leaf, None)
        if isinstance(value, torch.Tensor) and value.numel() > 0:
            yield "", value.detach()
        if leaf == "weight" and hasattr(module, "cpu_linear"):
            if self._unpacked[0] is not module:
                self._unpacked = module, unpack(module, entry.shape[-1], getattr(torch, entry.dtype))
            yield " (packed)", self._unpacked[1]


def unpack(module: nn.Module, width: int, dtype: torch.dtype) -> torch.Tensor:
    """The [N, width] matrix inside a CPU kernel. Exact: each product has one term that is not 0."""
    kernel: Any = module.cpu_linear
    identity = torch.eye(width, dtype=dtype)
    return torch.cat([kernel(rows, module.weight, None) for rows in identity.split(IDENTITY_ROWS)]).t().contiguous()


def _inner_name(model: nn.Module, name: str) -> str:
    """A checkpoint name as the vLLM model spells it."""
    mapper = getattr(model, "hf_to_vllm_mapper", None)
    prefixes = getattr(mapper, "orig_to_new_prefix", {})
    for old, new in prefixes.items():
        if new is not None and name.startswith(old):
            return new + name.removeprefix(old)
    return name


def _module(model: nn.Module, path: str) -> nn.Module | None:
    try:
        return model.get_submodule(path)
    except AttributeError:
        return None
