"""pass@k and pass@1 of an evaluation: unbiased estimates over P prompts."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass


def pass_at_k(num_samples: int, num_correct: int, k: int) -> float:
    """Probability that at least one of k samples is correct, estimated without bias from n >= k samples.

    1 - C(n - c, k) / C(n, k) (Chen et al. 2021, equation 1), exact in integers.
    """
    assert 0 <= num_correct <= num_samples and 1 <= k <= num_samples, (num_samples, num_correct, k)
    return 1 - math.comb(num_samples - num_correct, k) / math.comb(num_samples, k)


@dataclass(frozen=True)
class Estimate:
    """A mean over prompts and the standard error that the choice of prompts gives it (NaN for a single prompt)."""

    mean: float
    standard_error: float


def over_prompts(values: Sequence[float]) -> Estimate:
    """Mean of one value per prompt (its pass@k; for pass@1 the mean score of its samples), and s / sqrt(P).

    Samples of one prompt are not independent, so prompts are the unit: s is the unbiased deviation between prompts.
    """
    count = len(values)
    mean = math.fsum(values) / count
    if count == 1:
        return Estimate(mean, math.nan)
    variance = math.fsum((value - mean) ** 2 for value in values) / (count - 1)
    return Estimate(mean, math.sqrt(variance / count))
