"""Several sources as one sequence: concatenated or mixed by probability, without copying any item."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import TypeVar, overload

import numpy as np
from numpy.typing import NDArray

from rlhf_suite.data.sources import Sources

T_co = TypeVar("T_co", covariant=True)


class LazySequence(Sequence[T_co]):
    """A sequence whose items are built when they are read. Subclasses implement `__len__` and `at`."""

    @abstractmethod
    def at(self, place: int) -> T_co:
        """Return the item at `place`, 0 <= place < len(self)."""

    @overload
    def __getitem__(self, index: int) -> T_co: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[T_co]: ...
    def __getitem__(self, index: int | slice) -> T_co | Sequence[T_co]:
        places = range(len(self))[index]
        return self.at(places) if isinstance(places, int) else [self.at(place) for place in places]


class Combined(LazySequence[T_co]):
    """Several sequences as one, without copies.

    Without `order` they follow each other. With it, item i is item `order[i]` of their concatenation; `order` is [N].
    """

    def __init__(self, parts: Sequence[Sequence[T_co]], order: NDArray[np.int64] | None = None) -> None:
        self.parts, self.order = parts, order
        self.ends = np.cumsum([len(part) for part in parts])

    def __len__(self) -> int:
        return int(self.ends[-1]) if self.order is None else len(self.order)

    def at(self, place: int) -> T_co:
        place = place if self.order is None else int(self.order[place])
        which = int(np.searchsorted(self.ends, place, side="right"))
        return self.parts[which][place - int(self.ends[which])]  # a negative index, counted from the end of its part


def combine(parts: Sequence[Sequence[T_co]], sources: Sources, seed: int) -> Sequence[T_co]:
    """Return the items of all sources, at most `sources.max_samples` of them.

    Without probabilities the sources follow each other. If they have too many items, a seeded random sample that keeps
    their order is taken, so that no source disappears as a whole. With probabilities, each item is drawn from a source
    with its probability; each source is read in order, and again from its start, until every item was drawn at least
    once.
    """
    lengths, limit = [len(part) for part in parts], sources.max_samples
    if sources.probs is not None:
        which, index = mixture(lengths, sources.probs, seed, limit).T
        return Combined(parts, np.cumsum([0, *lengths])[which] + index)
    if len(parts) == 1:  # `limit_rows` has counted its rows already, and one row may give several items
        return parts[0]
    if limit is None or sum(lengths) <= limit:
        return Combined(parts)
    chosen = np.random.default_rng(seed).choice(sum(lengths), size=limit, replace=False)
    return Combined(parts, np.sort(chosen))


def mixture(lengths: Sequence[int], shares: Sequence[float], seed: int, limit: int | None = None) -> NDArray[np.int64]:
    """Return draws [N, 2] of (source, index in the source), the first `limit` of them.

    Sources are drawn at random with probabilities `shares`, which may be rounded. Each source is read in order and
    again from its start; the last draw is the one that completes the last source. The draws equal those of
    `datasets.interleave_datasets(probabilities, seed, stopping_strategy="all_exhausted")`.
    """
    rng = np.random.default_rng(seed)
    blocks: list[NDArray[np.int64]] = []
    drawn, probs = np.zeros(len(lengths), dtype=np.int64), np.asarray(shares) / sum(shares)
    while (drawn < lengths).any():
        if limit is not None and drawn.sum() >= limit:
            break
        blocks.append(rng.choice(len(lengths), size=1000, p=probs))
        drawn += np.bincount(blocks[-1], minlength=len(lengths))
    source = np.concatenate(blocks)
    index = np.empty_like(source)
    end = 0
    for which, length in enumerate(lengths):
        places = np.flatnonzero(source == which)
        index[places] = np.arange(len(places)) % length
        end = max(end, int(places[length - 1]) + 1 if len(places) >= length else len(source))
    return np.stack([source[:end], index[:end]], axis=1)[:limit]
