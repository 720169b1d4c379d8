"""One number for a solution from the scores of its steps."""

from __future__ import annotations

import math
from collections.abc import Sequence

from rlhf_suite.registry import step_aggregate


@step_aggregate(name="min")
def weakest(scores: Sequence[float]) -> float:
    """A solution is as good as its worst step."""
    return min(scores)


@step_aggregate()
def product(scores: Sequence[float]) -> float:
    """A solution is right when all its steps are: the product of their probabilities."""
    return math.prod(scores)


@step_aggregate()
def last(scores: Sequence[float]) -> float:
    """A solution is as good as where it ends."""
    return scores[-1]


@step_aggregate()
def mean(scores: Sequence[float]) -> float:
    """A solution is as good as its steps are on average."""
    return sum(scores) / len(scores)


def aggregated(scores: Sequence[float], name: str) -> float:
    """Return a solution's score from P(good) of each of its steps; 0 for one without steps: nothing in it is good."""
    return float(step_aggregate.load(name)(scores)) if scores else 0.0
