"""Reading the weights back from a vLLM model, wherever its loaders have put them.

This is the second half of the verification. On the CPU vLLM keeps matrices inside packed kernels. A packed [N, K]
matrix is read back by multiplying it with the [K, K] identity, which costs as much as a forward pass over K tokens;
packed experts by packing the numbers of their places in the same way. What cannot be read back (experts on a GPU, and
tensors that their loader has computed) is checked only by the log-prob probe.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn

from rlhf_suite.weight_sync.loads import Loads, Place, Target, holders

IDENTITY_ROWS = 512  # rows of the identity that are multiplied at a time
EXPERTS = ("w13_weight", "w2_weight")  # of vLLM's layers of experts: [experts, N, K] each
DIGIT = 8  # bits of a number that every floating-point type holds exactly


@dataclass(frozen=True)
class ReadBack:
    """The values of a place of the model: of the shape and type that its entry says."""

    place: Place
    where: str  # the name of the parameter, and how it is kept
    values: Tensor


def read_back(model: nn.Module, loads: Loads) -> Iterator[ReadBack]:
    """Yield the values at every place that the last reload has filled and that can be read.

    A place is read twice if the parameter is in two modules (an embedding and its tied head) or has a packed copy.
    """
    held = holders(model)
    for target in loads.targets():
        value = getattr(target.module, target.leaf, None)
        if target.is_computed or value is None or not target.like.is_contiguous():
            continue
        for path, module, leaf in held.get(id(value), ()):
            for kind, values in _contents(module, leaf, target):
                whole = values.to(target.like.dtype).contiguous()
                for place in target.places.values():
                    yield ReadBack(place, f"{path}.{leaf}{kind}", place.of(whole))


def _contents(module: nn.Module, leaf: str, target: Target) -> Iterator[tuple[str, Tensor]]:
    """Yield (kind, values) for what a module has of a parameter, in the shape that its loader knows: the tensor itself,
    and the packed copy in a CPU kernel."""
    value, like = getattr(module, leaf), target.like
    if leaf in EXPERTS and hasattr(getattr(module, "quant_method", None), "moe_kernel"):
        if (experts := unpack_experts(module, leaf, like)) is not None:
            yield " (packed)", experts
        return
    if leaf == "weight" and hasattr(module, "_cpu_unpacked_conv_weight"):
        yield " (packed)", unpack_convolution(value.detach()).view(like.shape)
        spare: Any = module._cpu_unpacked_conv_weight
        yield " (unpacked)", spare.view(like.shape)
        return
    # A type with fewer bits cannot hold what was loaded: the engine has computed it.
    if value.shape == like.shape and value.numel() and value.element_size() >= like.element_size():
        yield "", value.detach()
    if leaf == "weight" and hasattr(module, "cpu_linear") and like.dim() == 2:
        yield " (packed)", unpack(module, like)


def unpack(module: nn.Module, like: Tensor) -> Tensor:
    """Return the matrix inside a CPU kernel, of the shape [N, K] that it was packed from. This is exact: each sum of
    products has one term that is not 0. A kernel reads and writes memory by the width that it was packed with and does
    not check its input, so the width is that of the parameter and nothing else."""
    kernel: Any = module.cpu_linear
    identity = torch.eye(like.shape[1], dtype=like.dtype)
    return torch.cat([kernel(rows, module.weight, None) for rows in identity.split(IDENTITY_ROWS)]).t().contiguous()


def unpack_experts(module: Any, leaf: str, like: Tensor) -> Tensor | None:
    """Return the experts of a layer, [E, N, K] as they were before a CPU kernel padded and packed them; None if another
    kernel has them."""
    experts: Any = getattr(module.quant_method.moe_kernel, "fused_experts", None)
    if not hasattr(experts, "isa") or getattr(experts, "_use_zentorch", False):
        return None
    packed = getattr(module, leaf).detach()
    order = packed_order(tuple(packed.shape[1:]), packed.dtype, experts.isa)
    values = torch.empty_like(packed).flatten(1)
    values[:, order] = packed.flatten(1)
    values = values.view_as(packed)
    if leaf == EXPERTS[1]:
        return values[..., : like.shape[2]]
    halves = values.chunk(2, dim=1)  # gate and up are padded each
    return torch.cat([half[:, : like.shape[1] // 2] for half in halves], dim=1)


def unpack_convolution(packed: Tensor) -> Tensor:
    """Return the weights of a causal convolution, [channels, width] as they were before a CPU kernel packed them."""
    from vllm._custom_ops import causal_conv1d_weight_pack

    values = torch.empty_like(packed).flatten()
    shape = (packed.shape[0], packed.numel() // packed.shape[0])
    values[order_of(causal_conv1d_weight_pack, shape, packed.dtype)] = packed.flatten()
    return values.view(shape)


@lru_cache(maxsize=4)
def packed_order(shape: tuple[int, int], dtype: torch.dtype, isa: str) -> Tensor:
    """Return which element of an expert [N, K] is at each place of its packed form, [N * K]."""
    from vllm._custom_ops import cpu_prepack_moe_weight

    return order_of(lambda digits: cpu_prepack_moe_weight(digits[None], isa), shape, dtype)


def order_of(pack: Callable[[Tensor], Tensor], shape: tuple[int, int], dtype: torch.dtype) -> Tensor:
    """Return which element of a matrix [N, K] is at each place of its packed form, [N * K]. For that the numbers of the
    elements are packed, digit by digit."""
    numbers = torch.arange(shape[0] * shape[1]).view(shape)
    order = torch.zeros(shape[0] * shape[1], dtype=torch.int64)
    for shift in range(0, int(numbers.max()).bit_length(), DIGIT):
        digits = (numbers >> shift & (1 << DIGIT) - 1).to(dtype)
        order += pack(digits).flatten().to(torch.int64) << shift
    return order
