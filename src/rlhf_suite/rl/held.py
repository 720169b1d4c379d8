"""Reading back what a vLLM model holds, tensor by tensor in the checkpoint's names: the second half of the attestation.

vLLM fuses some of a checkpoint's tensors (q, k and v into one matrix), pads vocabularies, and on the CPU hides matrices
inside packed kernels. What cannot be read back (experts, sharded models) is left to the log-prob probe.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn

from rlhf_suite.rl.weights import TensorEntry

# Reading a packed [N, K] matrix multiplies it by the [K, K] identity; beyond this K that costs more than the sync.
MAX_PACKED_WIDTH = 1024


def held_tensors(
    model: nn.Module, expected: Mapping[str, TensorEntry]
) -> Iterator[tuple[TensorEntry, str, torch.Tensor]]:
    """(entry, place, values of the entry's shape) for every place in the model that can be read back.

    A tensor with two places (an embedding and the packed copy of a tied head) comes twice.
    """
    fused = _fused_siblings(model)
    for name, entry in expected.items():
        path, leaf = _inner_name(model, name).rpartition(".")[::2]
        parent, part = path.rpartition(".")[::2]
        whole, siblings = fused.get(part, (part, [part]))
        module = _module(model, f"{parent}.{whole}" if parent else whole)
        if module is None:
            continue
        names = [name.replace(f".{part}.", f".{sibling}.") for sibling in siblings]
        start = sum(expected[other].shape[0] for other in names[: siblings.index(part)]) if entry.shape else 0
        for place, values in _places(module, leaf, entry):
            rows = values[start : start + entry.shape[0]] if entry.shape else values
            if rows.shape == entry.shape:
                yield entry, f"{path}.{leaf}{place}", rows
    yield from _tied_head(model, expected)


def _places(module: nn.Module, leaf: str, entry: TensorEntry) -> Iterator[tuple[str, torch.Tensor]]:
    value = getattr(module, leaf, None)
    if isinstance(value, torch.Tensor) and value.numel() > 0:
        yield "", value.detach()
    if leaf == "weight" and hasattr(module, "cpu_linear") and entry.shape[-1] <= MAX_PACKED_WIDTH:
        yield " (packed)", unpack(module, entry.shape[-1], getattr(torch, entry.dtype))


def unpack(module: nn.Module, width: int, dtype: torch.dtype) -> torch.Tensor:
    """The [N, width] matrix inside a CPU kernel: its product with the identity, exact since all other terms are 0."""
    kernel: Any = module.cpu_linear
    return kernel(torch.eye(width, dtype=dtype), module.weight, None).t().contiguous()


def _tied_head(
    model: nn.Module, expected: Mapping[str, TensorEntry]
) -> Iterator[tuple[TensorEntry, str, torch.Tensor]]:
    """The output head of a model whose checkpoint has none of its own: it must hold the embedding."""
    head = _module(model, "lm_head")
    embedding = next((entry for name, entry in expected.items() if name.endswith("embed_tokens.weight")), None)
    if head is None or embedding is None or "lm_head.weight" in expected:
        return
    for place, values in _places(head, "weight", embedding):
        yield embedding, f"lm_head.weight{place}", values[: embedding.shape[0]]


def _inner_name(model: nn.Module, name: str) -> str:
    """A checkpoint name as the vLLM model spells it."""
    mapper = getattr(model, "hf_to_vllm_mapper", None)
    prefixes = getattr(mapper, "orig_to_new_prefix", {})
    for old, new in prefixes.items():
        if new is not None and name.startswith(old):
            return new + name.removeprefix(old)
    return name


def _fused_siblings(model: nn.Module) -> dict[str, tuple[str, list[str]]]:
    """Of each fused part, e.g. k_proj: the fused module's name and all its parts in the order of their rows."""
    mapping: Mapping[str, list[str]] = getattr(model, "packed_modules_mapping", {})
    return {part: (whole, parts) for whole, parts in mapping.items() for part in parts}


def _module(model: nn.Module, path: str) -> nn.Module | None:
    try:
        return model.get_submodule(path)
    except AttributeError:
        return None
