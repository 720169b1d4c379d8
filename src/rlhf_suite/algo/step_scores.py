"""One number for a solution from the scores of its steps."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

Aggregate = Callable[[Sequence[float]], float]

# A solution is as good as its worst step; right when all are; as good as where it ends; as good as it is on average.
AGGREGATES: dict[str, Aggregate] = {
    "min": min,
    "product": math.prod,
    "last": lambda scores: scores[-1],
    "mean": lambda scores: sum(scores) / len(scores),
}


def aggregated(scores: Sequence[float], name: str) -> float:
    """A solution's score from P(good) of each of its steps; one without any step has nothing that is good: 0."""
    return AGGREGATES[name](scores) if scores else 0.0
