"""Output rows of batch jobs: new columns beside those of the input, and what is chosen of a prompt's samples."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any


def with_columns(given: Mapping[str, Any], made: Mapping[str, Any], replaced: Collection[str] = ()) -> dict[str, Any]:
    """A row with all given columns and the made ones. A given column that has the name of a made one becomes
    `input_<name>`, unless it is one of `replaced`, whose content the made one has."""
    kept = {f"input_{name}" if name in made else name: value for name, value in given.items() if name not in replaced}
    return kept | dict(made)


def best(scores: Sequence[float]) -> int:
    """Index of the largest score, the first of equals."""
    return max(range(len(scores)), key=lambda index: (scores[index], -index))
