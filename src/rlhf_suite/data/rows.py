"""The rows a run works on: sources read one by one, then concatenated or mixed by probability."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from rlhf_suite.data.row import BadRows, DataError, Row, RowError, required
from rlhf_suite.data.sources import DATASET, EVAL, PROMPTS, SourceFlags, read_source
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
    "load_rows",
    "required",
    "source_names",
]


def source_names(spec: str) -> list[str]:
    """The sources of a comma list."""
    return [name.strip() for name in spec.split(",") if name.strip()]


def load_rows(  # noqa: PLR0913 - one section's flags, by name
    spec: str,
    *,
    split: str,
    probs: Sequence[float] | None,
    max_samples: int | None,
    seed: int,
    bad: BadRows,
    flags: SourceFlags = DATASET,
) -> list[Row]:
    """Rows of all sources of the comma list `spec`, at most `max_samples` of each and of the whole.

    Without `probs` the sources follow each other; if they are too many, a seeded sample that keeps the order is
    taken, so that no source is cut away whole. With `probs` each row is drawn from a source with its probability,
    going through the source in order and again from its start, until every row of every source has been seen.
    Malformed rows go to `bad`. `flags` are the flags the arguments came from, for error messages.
    """
    names = source_names(spec)
    if not names:
        raise UserError(
            f"{flags.dataset}={spec!r} names no source; give a file, a folder, a hub name or builtin:<task>"
        )
    if probs is not None:
        _check_probs(probs, names, flags)
    sources = [_read_all(name, split, max_samples, bad, flags) for name in names]
    if probs is None:
        rows = [row for source in sources for row in source]
        if max_samples is None or len(rows) <= max_samples:
            return rows
        chosen = np.random.default_rng(seed).choice(len(rows), size=max_samples, replace=False)
        return [rows[index] for index in sorted(chosen)]
    order = mixture([len(source) for source in sources], probs, seed)[:max_samples]
    return [sources[source][index] for source, index in order]


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


def _read_all(name: str, split: str, max_samples: int | None, bad: BadRows, flags: SourceFlags) -> list[Row]:
    rows: list[Row] = []
    for row in read_source(name, split, flags):
        if isinstance(row, RowError):
            bad.add(row.where, row.reason)
            continue
        rows.append(row)
        if len(rows) == max_samples:
            break
    if not rows:
        raise UserError(f"{flags.dataset}: no rows in {name!r}. {bad.summary()}".strip())
    return rows
