"""Splitting a ragged batch over ranks or micro-batches, and putting per-token or per-row results back in order."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import chain

import torch

from rlhf_suite.data.batch import B, TokenBatch, take, token_places, weightless
from rlhf_suite.data.packing import balance, micro_batches


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


def forward_groups(batch: TokenBatch, count: int, token_budget: int | None) -> list[list[int]]:
    """Return the micro-batches of a forward pass: by token budget when there is one, else `count` sequences each. A
    longer sequence raises the budget: a reward model reads more tokens than the policy wrote, for which the budget is
    meant."""
    lengths = batch.lengths.tolist()
    if token_budget is None:
        return micro_batches(lengths, count=count)
    return micro_batches(lengths, token_budget=max(token_budget, *lengths))


def reassemble(batch: TokenBatch, parts: Sequence[Sequence[int]], results: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the per-token results [T_part] of each part as one [T] in the order of `batch`."""
    order = torch.tensor(list(chain.from_iterable(parts)))
    results = [result for part, result in zip(parts, results, strict=True) if part]
    return torch.cat(results).index_select(0, token_places(batch.lengths[order], torch.argsort(order)))


def reassemble_rows(parts: Sequence[Sequence[int]], results: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the per-sequence results of each part as one [B] in the original order."""
    order = torch.tensor(list(chain.from_iterable(parts)))
    results = [result for part, result in zip(parts, results, strict=True) if part]
    return torch.cat(results)[torch.argsort(order)]


def in_micro_batches(
    batch: TokenBatch, groups: Sequence[Sequence[int]], rounds: int, forward: Callable[[TokenBatch], torch.Tensor]
) -> list[torch.Tensor]:
    """Return `forward` of each group, on the CPU. A rank with fewer than `rounds` groups repeats its last one,
    unrecorded, because under ZeRO-3 every rank must take part in every forward."""
    results = [forward(take(batch, group)).cpu() for group in groups]
    for _ in range(rounds - len(groups)):
        forward(take(batch, groups[-1]))
    return results
