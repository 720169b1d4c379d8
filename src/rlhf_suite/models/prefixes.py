"""What sequences of a batch begin with in common, such as the prompt of a pair of answers or of a group of samples: its
hidden states are computed once.

The state of a token depends on the tokens before it alone. So where two sequences begin with the same tokens, one pass
over these gives the states of both, and the gradients of both add up in it. Sorted by their tokens, each sequence has
most in common with the one before it; so beginnings of beginnings are found too, as in a tree.

B sequences, T tokens, of which S are computed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rlhf_suite.data.batch import TokenBatch, send_together
from rlhf_suite.models.dropout import drops_out
from rlhf_suite.models.families import PREFIXES, VARLEN
from rlhf_suite.models.wrapped import WrappedModel

Integers = NDArray[np.int64]
SHORTEST = 8  # tokens of a beginning that is worth its entries in the indices
LEAST_SAVED = 1 / 16  # of the tokens: indices and copies of keys take time too


@dataclass(frozen=True)
class SharedPrefixes:
    """Which tokens of a batch are computed, at the end of each sequence, and where the states of all are found."""

    computed: Tensor  # [S] the tokens that are computed, ascending
    places: Tensor  # [T] where the state of each token stands among those that are computed
    cu_lengths: Tensor  # [B+1] int32: 0 and the running sum of the numbers of computed tokens
    longest: int  # the most computed tokens of a sequence
    runs: tuple[tuple[int, int, int], ...]  # of neighbours that are alike: count, computed tokens, all tokens

    def expand(self, states: Tensor) -> Tensor:
        """Return the states [T, ...] of all tokens, given those that are computed, [S, ...]."""
        return states.index_select(0, self.places)


def may_share(module: WrappedModel, batch: TokenBatch) -> bool:
    """Return whether a model computes what sequences of a batch have in common once: as ds.share_prefixes wants it, and
    where that changes no result."""
    wanted = not batch.ids.is_cuda if module.share_prefixes is None else module.share_prefixes
    if not wanted or not module.packed or module.sequence_group is not None or module.family.why_not(PREFIXES):
        return False
    if batch.images is not None or (module.training and drops_out(module)):
        return False
    attention: str = module.model.config.get_text_config()._attn_implementation
    return attention == VARLEN


def find_prefixes(batch: TokenBatch) -> SharedPrefixes | None:
    """Return what the sequences of a batch have in common; None if it is too little to be worth it."""
    sharing = sort_sequences(batch)
    if sharing is None:
        return None
    order, own = sharing
    lengths = batch.host_lengths.numpy()
    ends, total = lengths.cumsum(), int(lengths.sum())
    is_own = np.arange(total) >= np.repeat(ends - own, lengths)
    columns = (np.flatnonzero(is_own), find_places(order, own, lengths), np.append(0, own.cumsum()).astype(np.int32))
    computed, places, borders = send_together([torch.from_numpy(column) for column in columns], batch.ids.device)
    alike = groupby(zip(own.tolist(), lengths.tolist(), strict=True))
    runs = tuple((len(list(equal)), *pair) for pair, equal in alike)
    return SharedPrefixes(computed, places, borders, int(own.max()), runs)


def find_neighbours(module: WrappedModel, batch: TokenBatch) -> list[int] | None:
    """Return an order of sequences in which those that share most are neighbours, for micro-batches of them; None if
    they share too little, or the model cannot."""
    sharing = sort_sequences(batch) if may_share(module, batch) else None
    return None if sharing is None else sharing[0]


def sort_sequences(batch: TokenBatch) -> tuple[list[int], Integers] | None:
    """Return the numbers of the sequences, sorted by their tokens, and how many tokens of each sequence are then to be
    computed, [B]; None if too few are saved."""
    lengths = batch.host_lengths.numpy()
    rows = np.split(batch.host_ids.numpy(), lengths.cumsum()[:-1])
    keys = [row.astype(">i4").tobytes() for row in rows]  # as bytes they sort like the numbers
    order = sorted(range(len(rows)), key=keys.__getitem__)
    own = lengths - common_lengths(rows, order)
    return (order, own) if own.sum() <= (1 - LEAST_SAVED) * lengths.sum() else None


def common_lengths(rows: Sequence[Integers], order: Sequence[int]) -> Integers:
    """Return how many tokens each sequence takes from the one before it in an order, [B]: never its last, and none if
    they are few."""
    common = np.zeros(len(rows), np.int64)
    for before, row in pairwise(order):
        size = max(0, min(len(rows[before]), len(rows[row]) - 1))
        differs = rows[before][:size] != rows[row][:size]
        shared = int(differs.argmax()) if differs.any() else size
        common[row] = shared if shared >= SHORTEST else 0
    return common


def find_places(order: Sequence[int], own: Integers, lengths: Integers) -> Integers:
    """Return where the state of each token stands among those that are computed, [T]: the last `own` [B] tokens of each
    sequence are, and the others have the states of the sequence before it in the order."""
    ends = lengths.cumsum()
    starts = ends - lengths
    places = np.arange(int(lengths.sum())) + np.repeat(own.cumsum() - ends, lengths)
    for before, row in pairwise(order):
        common = int(lengths[row] - own[row])
        places[starts[row] : starts[row] + common] = places[starts[before] : starts[before] + common]
    return places
