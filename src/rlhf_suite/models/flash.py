"""Attention kernels of GPUs for sequences of several lengths that are laid end to end: the fastest package that this
environment has for the device, or the kernel of torch.

A package is compared with torch before its numbers are used, once for each shape: FlashAttention 4 (4.0.0b36) returns
wrong gradients on a Hopper GPU for most head sizes that are not a multiple of 32, and says nothing.

T tokens, B sequences, H query heads, K key/value heads, D head size.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache, partial
from importlib import import_module
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor

from rlhf_suite.errors import UserError

# The packages, the fastest first, and the GPUs that they are for (the first number of the compute capability):
# FlashAttention 3, 4 and 2.
PACKAGES = {"flash_attn_interface": (9,), "flash_attn.cute": (9, 10), "flash_attn": (8, 9, 10, 12)}
WITH_DROPOUT = "flash_attn"
TRIED_LENGTHS = (5, 70, 1, 130, 9)
TRIED_ENDS = (5, 30, 1, 129, 2)  # so many last tokens of these
TRIED_WINDOW = 7
PARTS = ("output", "gradient of queries", "gradient of keys", "gradient of values")
LARGEST_ERROR = 0.02  # relative; kernels that are right were up to 3e-3 apart in bf16


class Ends(NamedTuple):
    """Which queries there are: those of so many last tokens of each sequence."""

    borders: Tensor  # [B+1] int32: 0 and the running sum of their numbers
    longest: int


@dataclass(frozen=True)
class FlashCall:
    """The settings of causal attention."""

    borders: Tensor  # [B+1] int32: 0 and the running sum of lengths
    longest: int
    scaling: float | None  # None: D ** -0.5
    window: int | None  # a token sees itself and at most window - 1 tokens before it
    dropout: float
    ends: Ends | None = None  # None: the queries are those of all tokens

    @property
    def queries(self) -> Ends:
        return self.ends or Ends(self.borders, self.longest)


Kernel = Callable[[list[Tensor], FlashCall], Tensor]  # [S, H, D], [T, K, D], [T, K, D] to [S, H, D]; S: all or ends


@dataclass(frozen=True)
class Shape:
    """What a kernel is compiled for."""

    heads: int
    key_heads: int
    size: int
    dtype: torch.dtype
    has_window: bool
    trains: bool  # whether it also computes gradients


def attend_flash(states: list[Tensor], call: FlashCall) -> Tensor:
    """Return the attention [S, H, D] of queries [S, H, D], keys and values [T, K, D] in bf16 or fp16; of all tokens, or
    where `takes_ends` says so, of the ends of sequences.

    Raises:
        UserError: no kernel here has the dropout that the model asks for.
    """
    return kernel_of(states, call)(states, call)


def kernel_of(states: list[Tensor], call: FlashCall) -> Kernel:
    """Return the kernel of a call: that of a package where there is one that can be trusted, or torch's."""
    name = find_package()
    if name is None or (call.dropout > 0 and name != WITH_DROPOUT):
        return attend_by_torch
    return by_package(name) if trust_package(name, shape_of(states, call)) else attend_by_torch


def shape_of(states: list[Tensor], call: FlashCall) -> Shape:
    """Return what a kernel is compiled for."""
    query, key, _ = states
    trains = torch.is_grad_enabled() and query.requires_grad
    return Shape(query.shape[1], key.shape[1], query.shape[2], query.dtype, call.window is not None, trains)


def takes_ends(states: list[Tensor], call: FlashCall) -> bool:
    """Return whether the kernel of a call with `ends` computes them as it does in whole sequences."""
    return trust_ends(kernel_of(states, call), shape_of(states, call))


@cache
def find_package() -> str | None:
    """Return the fastest of PACKAGES that this environment has for this GPU."""
    if not torch.cuda.is_available():  # tensors without content can name a device that is not there
        return None
    capability = torch.cuda.get_device_capability()[0]
    for name, capabilities in PACKAGES.items():
        with suppress(ImportError):
            # The package of FlashAttention 4 makes flash_attn a name that can be imported, without this function.
            if capability in capabilities and hasattr(import_module(name), "flash_attn_varlen_func"):
                return name
    return None


@cache
def by_package(name: str) -> Kernel:
    """Return the kernel of a package."""
    return partial(attend_by_package, name)


def attend_by_package(name: str, states: list[Tensor], call: FlashCall) -> Tensor:
    """Return attention that one of PACKAGES computes."""
    settings: dict[str, Any] = {"dropout_p": call.dropout} if name == WITH_DROPOUT else {}
    output = import_module(name).flash_attn_varlen_func(
        *states,
        cu_seqlens_q=call.queries.borders,
        cu_seqlens_k=call.borders,
        max_seqlen_q=call.queries.longest,
        max_seqlen_k=call.longest,
        softmax_scale=call.scaling,
        causal=True,
        window_size=(-1, -1) if call.window is None else (call.window - 1, 0),
        deterministic=torch.are_deterministic_algorithms_enabled(),
        **settings,
    )
    result = output[0] if isinstance(output, tuple) else output
    assert isinstance(result, Tensor)
    return result


def attend_by_torch(states: list[Tensor], call: FlashCall) -> Tensor:
    """Return attention that the variable-length kernel of torch computes."""
    from torch.nn.attention.varlen import varlen_attn

    if call.dropout > 0:
        raise UserError(
            "attention_dropout > 0 on CUDA needs the package flash-attn 2. Set it to 0 in the model's config.json"
        )
    window = (-1, 0) if call.window is None else (call.window - 1, 0)
    query, key, value = states
    output = varlen_attn(
        query, key, value, call.queries.borders, call.borders, call.queries.longest, call.longest,
        scale=call.scaling, window_size=window, enable_gqa=query.shape[1] != key.shape[1],
    )  # fmt: skip
    assert isinstance(output, Tensor)
    return output


@cache
def trust_package(name: str, shape: Shape) -> bool:
    """Return whether a package agrees with torch about a shape; warn if it does not."""
    wrong = find_errors(by_package(name), attend_by_torch, shape)
    if wrong:
        warnings.warn(
            f"The kernel of {name} is not used for {shape.heads} heads of size {shape.size}, because it and the kernel "
            f"of torch are apart ({wrong}; relative). The kernel of torch computes attention",
            stacklevel=2,
        )
    return not wrong


@cache
def trust_ends(kernel: Kernel, shape: Shape) -> bool:
    """Return whether a kernel agrees with itself about the ends of sequences; warn if it does not."""
    wrong = find_errors(partial(attend_ends, kernel), partial(attend_and_select, kernel), shape)
    if wrong:
        warnings.warn(
            f"Attention to shared prefixes is computed by SDPA, because the kernel for {shape.heads} heads of size "
            f"{shape.size} computes ends of sequences in another way than whole ones ({wrong}; relative). "
            "ds.share_prefixes=false may be faster",
            stacklevel=2,
        )
    return not wrong


def find_errors(kernel: Kernel, reference: Kernel, shape: Shape) -> str:
    """Return in what two kernels are apart on this GPU; empty if in nothing."""
    errors = compare(kernel, reference, shape, torch.device("cuda"))
    return ", ".join(
        f"{part} {error:.1e}" for part, error in zip(PARTS, errors, strict=False) if not error <= LARGEST_ERROR
    )


def attend_ends(kernel: Kernel, states: list[Tensor], call: FlashCall) -> Tensor:
    """Return what a kernel gives queries at the ends of the tried sequences."""
    query, key, value = states
    borders = torch.tensor([0, *accumulate(TRIED_ENDS)], dtype=torch.int32, device=query.device)
    return kernel([query[tried_ends()], key, value], replace(call, ends=Ends(borders, max(TRIED_ENDS))))


def attend_and_select(kernel: Kernel, states: list[Tensor], call: FlashCall) -> Tensor:
    """Return the same out of what it gives all queries."""
    return kernel(states, call)[tried_ends()]


def tried_ends() -> list[int]:
    """Return the tokens at the ends of the tried sequences."""
    ends = zip(accumulate(TRIED_LENGTHS), TRIED_ENDS, strict=True)
    return [token for end, count in ends for token in range(end - count, end)]


def compare(kernel: Kernel, reference: Kernel, shape: Shape, device: torch.device) -> list[float]:
    """Return the relative errors of a kernel's output and, if the shape trains, of its gradients for queries, keys and
    values, for a few short sequences of random states. It may be called within a forward pass."""
    generator = torch.Generator(device).manual_seed(0)

    def draw(heads: int) -> Tensor:
        return torch.randn(sum(TRIED_LENGTHS), heads, shape.size, generator=generator, device=device)

    borders = torch.tensor([0, *accumulate(TRIED_LENGTHS)], dtype=torch.int32, device=device)
    call = FlashCall(borders, max(TRIED_LENGTHS), None, TRIED_WINDOW if shape.has_window else None, 0.0)
    # Gradient checkpointing keeps the tensors of a forward pass by hooks, which are not for these.
    hooks = torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor)
    with torch.inference_mode(False), torch.enable_grad(), hooks:
        heads = (shape.heads, shape.key_heads, shape.key_heads)
        states = [draw(count).to(shape.dtype).requires_grad_(shape.trains) for count in heads]
        weights, results = draw(shape.heads), []
        for attend in (kernel, reference):
            output = attend(states, call)
            weighted = output.float() * weights[: len(output)]
            gradients = torch.autograd.grad(weighted.sum(), states) if shape.trains else ()
            results.append([tensor.detach().float() for tensor in (output, *gradients)])
    return [float((ours - other).norm() / other.norm()) for ours, other in zip(*results, strict=True)]


# A compiler takes what these return as constants.
torch.compiler.assume_constant_result(find_package)
torch.compiler.assume_constant_result(trust_package)
torch.compiler.assume_constant_result(trust_ends)
