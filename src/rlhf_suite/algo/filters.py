"""Which groups of samples are worth training on."""

from __future__ import annotations

import math
from collections.abc import Sequence

ROUNDING = 1e-8  # scores that differ by less are the same


def teaches(scores: Sequence[float], low: float, high: float, min_std: float) -> bool:
    """Whether a group's mean score is strictly between `low` and `high` (DAPO, Yu et al. 2025), and its scores differ:
    their deviation (biased) is above `min_std`. A group that agrees has no advantages, whatever its mean.
    """
    mean = math.fsum(scores) / len(scores)
    deviation = math.sqrt(math.fsum((score - mean) ** 2 for score in scores) / len(scores))
    return low < mean < high and deviation > max(min_std, ROUNDING)
