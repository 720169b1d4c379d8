"""What sequences of a batch begin with in common, such as the prompt of a pair of answers or of a group of samples: its
hidden states are computed once.

The state of a token depends on the tokens before it alone. So where two sequences begin with the same tokens, one pass
over these gives the states of both, and the gradients of both add up in it. Sorted by their tokens, each sequence has
most in common with the one before it; so beginnings of beginnings are found too, as in a tree.

B sequences, T tokens, of which S are computed.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import groupby, pairwise
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rlhf_suite.data.batch import TokenBatch, send_together
from rlhf_suite.models.dropout import drops_out
from rlhf_suite.models.families import PREFIXES, VARLEN

if TYPE_CHECKING:
    from rlhf_suite.models.forward import LanguageModel, ScalarModel

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


def may_share(module: LanguageModel | ScalarModel, batch: TokenBatch) -> bool:
    """Return whether a model computes what sequences of a batch have in common once: as ds.share_prefixes wants it, and
    where that changes no result."""
    wanted = not batch.ids.is_cuda if module.share_prefixes is None else module.share_prefixes
    if not wanted or not module.packed or module.sequence_group is not None or module.family.why_not(PREFIXES):
        return False
    if batch.images is not None or batch.routes is not None or (module.training and drops_out(module)):
        return False
    attention: str = module.model.config.get_text_config()._attn_implementation
    return attention == VARLEN


def find_prefixes(batch: TokenBatch) -> SharedPrefixes | None:
    """Return what the sequences of a batch have in common; None if it is too little to be worth it."""
    ids, lengths = batch.host_ids.numpy(), batch.host_lengths.numpy()
    places, own = share(ids, lengths)
    if own.sum() > (1 - LEAST_SAVED) * len(ids):
        return None
    is_own = np.arange(len(ids)) >= np.repeat(lengths.cumsum() - own, lengths)
    columns = (np.flatnonzero(is_own), places, np.append(0, own.cumsum()).astype(np.int32))
    computed, expanded, borders = send_together([torch.from_numpy(column) for column in columns], batch.ids.device)
    runs = groupby(zip(own.tolist(), lengths.tolist(), strict=True))
    alike = tuple((len(list(equal)), *pair) for pair, equal in runs)
    return SharedPrefixes(computed, expanded, borders, int(own.max()), alike)


def share(ids: NDArray[np.int64], lengths: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return where the state of each token is found among those that are computed, [T], and how many tokens of each
    sequence are computed, [B]: at least its last."""
    ends = lengths.cumsum()
    rows = [ids[end - length : end] for end, length in zip(ends, lengths, strict=True)]
    order = sorted(range(len(rows)), key=lambda row: rows[row].astype(">i4").tobytes())
    common = np.zeros_like(lengths)
    for before, row in pairwise(order):
        common[row] = count_common(rows[before], rows[row])
    own = lengths - common
    shift = np.repeat(own.cumsum() - ends, lengths)
    places = np.arange(len(ids)) + shift
    for before, row in pairwise(order):
        count, begin, source = common[row], ends[row] - lengths[row], ends[before] - lengths[before]
        places[begin : begin + count] = places[source : source + count]
    return places, own


def count_common(one: NDArray[np.int64], other: NDArray[np.int64]) -> int:
    """Return how many tokens `other` takes from the beginning of `one`: never its last, and 0 if they are few."""
    size = max(0, min(len(one), len(other) - 1))
    differs = one[:size] != other[:size]
    common = int(differs.argmax()) if differs.any() else size
    return common if common >= SHORTEST else 0
