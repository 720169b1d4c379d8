"""Splitting a ragged batch over ranks or micro-batches, and putting per-token or per-row results back in order."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain

import numpy as np
import torch

from rlhf_suite.data.batch import B, TokenBatch, take, weightless
from rlhf_suite.data.packing import balance


def shards(batch: B, parts: Sequence[Sequence[int]]) -> list[B]:
    """Return one batch per part. A part without sequences, where ranks outnumber them, gets one of the first part that
    weighs nothing, because its rank still has to take part in the collectives. All sequences in their order are the
    batch itself."""
    if len(parts) == 1 and list(parts[0]) == list(range(len(batch))):
        return [batch]
    return [take(batch, part) if part else weightless(take(batch, parts[0][:1])) for part in parts]


def balanced_parts(batch: TokenBatch, ranks: int, chosen: Sequence[int] | None = None) -> list[list[int]]:
    """Return the sequences of each of `ranks` parts with nearly equal token counts: of all sequences, or of `chosen`
    ones."""
    rows = list(range(len(batch))) if chosen is None else list(chosen)
    if ranks == 1:
        return [rows]
    return [[rows[place] for place in part] for part in balance(batch.lengths[rows].tolist(), ranks)]


def split(batch: B, steps: Sequence[Sequence[int]], ranks: int) -> list[list[B]]:
    """Return for each rank its share of every optimiser step; `steps` has the sequences of each."""
    per_step = [shards(batch, balanced_parts(batch, ranks, step)) for step in steps]
    return [[shares[rank] for shares in per_step] for rank in range(ranks)]


@dataclass(frozen=True)
class Division:
    """Which sequences of a batch each part has, and how the results of the parts become those of the batch."""

    lengths: torch.Tensor  # [B] of all sequences
    parts: Sequence[Sequence[int]]

    @cached_property
    def rows(self) -> torch.Tensor:
        """Where each sequence of the batch stands when the parts are laid end to end, [B]."""
        return torch.argsort(torch.tensor(list(chain.from_iterable(self.parts))))

    def per_token(self, results: Sequence[torch.Tensor]) -> torch.Tensor:
        """Return the per-token results [T_part, ...] of each part as one [T, ...] in the order of the batch. Each
        sequence is copied once: an index of all tokens, and results laid end to end, would take memory of their size.
        """
        ends = self.lengths.cumsum(0).tolist()
        joined = np.empty((ends[-1], *results[0].shape[1:]), results[0].numpy().dtype)
        for part, result in zip(self.parts, results, strict=True):
            values, done = result.numpy(), 0
            for row in part:
                begin = ends[row - 1] if row else 0
                joined[begin : ends[row]] = values[done : (done := done + ends[row] - begin)]
        return torch.from_numpy(joined)

    def per_row(self, results: Sequence[torch.Tensor]) -> torch.Tensor:
        """Return the per-sequence results of each part as one [B] in the order of the batch."""
        own = [result for part, result in zip(self.parts, results, strict=True) if part]
        return torch.cat(own)[self.rows]


class ForwardBatch:
    """A batch for forward passes, which read no columns but those of `TokenBatch`. It is divided once for all models
    that have as many ranks."""

    def __init__(self, batch: TokenBatch) -> None:
        self.tokens = TokenBatch(batch.ids, batch.lengths, batch.mask, batch.index, images=batch.images)
        self.routes = batch.routes
        self.known: dict[tuple[int, bool], tuple[Division, list[TokenBatch]]] = {}

    def over(self, ranks: int, routed: bool = False) -> tuple[Division, list[TokenBatch]]:
        """Return how the batch is divided over so many ranks, and the shard of each; `routed`: with the routes."""
        key = ranks, routed and self.routes is not None
        if key not in self.known:
            parts = balanced_parts(self.tokens, ranks)
            whole = replace(self.tokens, routes=self.routes) if key[1] else self.tokens
            self.known[key] = Division(self.tokens.lengths, parts), shards(whole, parts)
        return self.known[key]


def in_micro_batches(
    batch: TokenBatch, groups: Sequence[Sequence[int]], rounds: int, forward: Callable[[TokenBatch], torch.Tensor]
) -> list[torch.Tensor]:
    """Return `forward` of each group, on the CPU. A rank with fewer than `rounds` groups repeats its last one,
    unrecorded, because under ZeRO-3 every rank must take part in every forward. The results are read once, at the end:
    each pass is launched while the device computes the one before."""
    results = [forward(take(batch, group)) for group in groups]
    for _ in range(rounds - len(groups)):
        forward(take(batch, groups[-1]))
    return list(torch.cat(results).cpu().split([len(result) for result in results]))
