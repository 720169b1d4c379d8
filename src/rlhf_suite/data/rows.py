"""The rows a run works on: sources read one by one, then concatenated or mixed by probability."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from rlhf_suite.data.lazy import Lazy
from rlhf_suite.data.row import BadRows, DataError, Row, RowError, required
from rlhf_suite.data.sources import DATASET, EVAL, PROMPTS, SourceFlags
from rlhf_suite.errors import UserError

__all__ = [
    "DATASET",
    "EVAL",
    "PROMPTS",
    "BadRows",
    "DataError",
    "Row",
    "RowError",
    "SourceFlags",
    "Sources",
    "combine",
    "limited",
    "required",
    "set_names",
    "source_names",
]

T_co = TypeVar("T_co", covariant=True)


def source_names(spec: str) -> list[str]:
    """The sources of a comma list."""
    return [name.strip() for name in spec.split(",") if name.strip()]


def set_names(sources: Sequence[str]) -> list[str]:
    """What each source is called in metrics: its last part, or all of it where several have the same."""
    stems = [Path(source).stem for source in sources]
    return [source if stems.count(stem) > 1 else stem for stem, source in zip(stems, sources, strict=True)]


@dataclass(frozen=True)
class Sources:
    """A comma list of sources, of which split, how many rows of each (and of the whole), and how they are mixed.

    `flags` are the flags all this came from, for error messages."""

    spec: str
    split: str
    max_samples: int | None = None
    probs: Sequence[float] | None = None
    flags: SourceFlags = DATASET

    @property
    def names(self) -> list[str]:
        """Each source; UserError where there are none, or other probabilities than sources."""
        names, flags = source_names(self.spec), self.flags
        if not names:
            raise UserError(
                f"{flags.dataset}={self.spec!r} names no source; give a file, a folder, a hub name or builtin:<task>"
            )
        if self.probs is not None:
            _check_probs(self.probs, names, flags)
        return names


def limited(rows: Iterator[Row | RowError], max_samples: int | None) -> Iterator[Row | RowError]:
    """The rows up to the first `max_samples` that are not malformed."""
    left = max_samples
    for row in rows:
        yield row
        if isinstance(row, Row) and left is not None:
            left -= 1
            if left == 0:
                return


class Combined(Lazy[T_co]):
    """Several sequences as one: end to end, or in the order of `order` [N], whose entries count from the first item of
    the first sequence. Nothing is copied."""

    def __init__(self, parts: Sequence[Sequence[T_co]], order: NDArray[np.int64] | None = None) -> None:
        self.parts, self.order = parts, order
        self.ends = np.cumsum([len(part) for part in parts])

    def __len__(self) -> int:
        return int(self.ends[-1]) if self.order is None else len(self.order)

    def at(self, place: int) -> T_co:
        place = place if self.order is None else int(self.order[place])
        which = int(np.searchsorted(self.ends, place, side="right"))
        return self.parts[which][place - int(self.ends[which])]  # counted from the end of its part


def combine(parts: Sequence[Sequence[T_co]], sources: Sources, seed: int) -> Sequence[T_co]:
    """The items of all sources, at most `max_samples`.

    Without probabilities the sources follow each other; if they are too many, a seeded sample that keeps the order is
    taken, so that no source is cut away whole. With them each item is drawn from a source with its probability, going
    through the source in order and again from its start, until every item of every source has been seen.
    """
    lengths, limit = [len(part) for part in parts], sources.max_samples
    if sources.probs is not None:
        which, index = mixture(lengths, sources.probs, seed)[:limit].T
        return Combined(parts, np.cumsum([0, *lengths])[which] + index)
    if len(parts) == 1:  # its rows are counted already, and a row may make several items
        return parts[0]
    if limit is None or sum(lengths) <= limit:
        return Combined(parts)
    chosen = np.random.default_rng(seed).choice(sum(lengths), size=limit, replace=False)
    return Combined(parts, np.sort(chosen))


def mixture(lengths: Sequence[int], probs: Sequence[float], seed: int) -> NDArray[np.int64]:
    """Draws [N, 2] of (source, index in it): sources at random by `probs`, each in order and from its start again
    when used up; the last draw is the one that completes the last source.

    The same draws as `datasets.interleave_datasets(probabilities, seed, stopping_strategy="all_exhausted")`.
    """
    rng = np.random.default_rng(seed)
    blocks: list[NDArray[np.int64]] = []
    drawn = np.zeros(len(lengths), dtype=np.int64)
    while (drawn < lengths).any():
        blocks.append(rng.choice(len(lengths), size=1000, p=probs))
        drawn += np.bincount(blocks[-1], minlength=len(lengths))
    source = np.concatenate(blocks)
    index = np.empty_like(source)
    end = 0
    for which, length in enumerate(lengths):
        places = np.flatnonzero(source == which)
        index[places] = np.arange(len(places)) % length
        end = max(end, int(places[length - 1]) + 1)
    return np.stack([source[:end], index[:end]], axis=1)


def _check_probs(probs: Sequence[float], names: Sequence[str], flags: SourceFlags) -> None:
    given = f"{flags.probs}={list(probs)}"
    if len(probs) != len(names):
        raise UserError(f"{given}: {len(probs)} probabilities for {len(names)} sources in {flags.dataset}")
    if min(probs) <= 0:
        raise UserError(f"{given}: a source with probability 0 is never used up; leave it out of {flags.dataset}")
    if abs(sum(probs) - 1) > 1e-6:
        scaled = [round(prob / sum(probs), 6) for prob in probs]
        raise UserError(f"{given}: the sum is {sum(probs):g}, not 1; in proportion it would be {scaled}")
