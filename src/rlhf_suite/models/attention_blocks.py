"""Attention of some queries to some keys, forward and backward, in a form in which several such blocks can be added up.

A block is either causal within pieces of a row, or has no mask: every query sees every key. With S = q k^T * scale over
a block, the blocks of a query are merged by their logsumexp:

    lse = log(sum_b exp(lse_b))      out = sum_b out_b * exp(lse_b - lse)

The backward pass of a block is that of a flash kernel, given `out` and `lse` of all blocks: P = exp(S - lse) are the
probabilities among all keys. So no matrix of scores exists in memory.

q queries and k keys of a block, H query heads, K key/value heads, D head size.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

from rlhf_suite.data.batch import send_together

Run = tuple[int, int, int]  # neighbouring pieces of equal length: first token, count, length


class States(NamedTuple):
    """What a block reads."""

    query: Tensor  # [H, q, D]
    key: Tensor  # [K, k, D]
    value: Tensor  # [K, k, D]


class Attended(NamedTuple):
    """The attention of queries to the keys of a block or of several."""

    output: Tensor  # [H, q, D]
    normaliser: Tensor  # [H, q], the logsumexp of the scores

    def merge(self, other: Attended) -> Attended:
        """Return the attention to the keys of both."""
        both = torch.logaddexp(self.normaliser, other.normaliser)
        mine, others = ((attended.normaliser - both).exp()[..., None] for attended in (self, other))
        return Attended(self.output * mine + other.output * others, both)


@dataclass(frozen=True)
class Block:
    """Some of the queries, and the keys that they attend to."""

    queries: slice
    keys: slice
    device: torch.device
    lengths: tuple[int, ...] = ()  # causal within pieces of these lengths; empty: every query sees every key

    @property
    def is_causal(self) -> bool:
        return bool(self.lengths)

    @cached_property
    def runs(self) -> list[Run | None]:
        """The runs of a causal block; of another one None, once."""
        runs: list[Run | None] = []
        start = 0
        for length in self.lengths:
            last = runs[-1] if runs else None
            if last is not None and last[2] == length:
                runs[-1] = (last[0], last[1] + 1, length)
            else:
                runs.append((start, 1, length))
            start += length
        return runs or [None]

    @cached_property
    def borders(self) -> tuple[Tensor, Tensor, int, int]:
        """Where the pieces of queries and of keys end, and the longest of each."""
        sides = [self.lengths or (tokens.stop - tokens.start,) for tokens in (self.queries, self.keys)]
        ends = [torch.tensor((0, *accumulate(side)), dtype=torch.int32) for side in sides]
        queries, keys = send_together(ends, self.device)
        return queries, keys, max(sides[0]), max(sides[1])

    def forward(self, states: States, scale: float) -> Attended:
        """Return the attention to the keys of this block."""
        if states.query.is_cuda:
            return self._flash_forward(states, scale)
        kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
        parts = [
            kernel(*(in_run(state, run) for state in states), is_causal=self.is_causal, scale=scale)
            for run in self.runs
        ]
        outputs, normalisers = ([lay_end_to_end(piece) for piece in pieces] for pieces in zip(*parts, strict=True))
        return Attended(torch.cat(outputs, 1), torch.cat(normalisers, 1))

    def backward(self, gradient: Tensor, states: States, whole: Attended, scale: float) -> States:
        """Return the gradients of what this block reads, from the `gradient` [H, q, D] of the output. `whole` is the
        attention to the keys of all blocks."""
        if states.query.is_cuda:
            return self._flash_backward(gradient, states, whole, scale)
        kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
        parts = [
            kernel(*(in_run(state, run) for state in (gradient, *states, *whole)), 0.0, self.is_causal, scale=scale)
            for run in self.runs
        ]
        return States(
            *(torch.cat([lay_end_to_end(piece) for piece in pieces], 1) for pieces in zip(*parts, strict=True))
        )

    def _flash_forward(self, states: States, scale: float) -> Attended:
        """Do as `forward` does, by torch's variable-length flash kernel."""
        tokens = [state.transpose(0, 1) for state in states]  # [q|k, H|K, D]
        result = torch.ops.aten._flash_attention_forward(
            *tokens, *self.borders, 0.0, self.is_causal, False, scale=scale
        )
        return Attended(result[0].transpose(0, 1), result[1])

    def _flash_backward(self, gradient: Tensor, states: States, whole: Attended, scale: float) -> States:
        """Do as `backward` does, by torch's variable-length flash kernel."""
        tokens = [state.transpose(0, 1).contiguous() for state in (gradient, *states, whole.output)]
        seed = torch.zeros(2, dtype=torch.uint64, device=self.device)  # of dropout, which is off
        unused = torch.empty(0, device=self.device)
        gradients = torch.ops.aten._flash_attention_backward(
            *tokens, whole.normaliser.contiguous(), *self.borders, 0.0, self.is_causal, seed, unused, scale=scale
        )
        return States(*(part.transpose(0, 1) for part in gradients))


def in_run(states: Tensor, run: Run | None) -> Tensor:
    """Return the tokens of a run of pieces, [count, H, length, ...], out of [H, q, ...]; without a run all, in one."""
    if run is None:
        return states[None]
    start, count, length = run
    return states[:, start : start + count * length].unflatten(1, (count, length)).transpose(0, 1)


def lay_end_to_end(pieces: Tensor) -> Tensor:
    """Return [H, count * length, ...] of pieces [count, H, length, ...]."""
    return pieces.transpose(0, 1).flatten(1, 2)
