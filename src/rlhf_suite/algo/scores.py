"""Scores of responses: from the raw score to the reward that estimators see, which groups teach, and pass@k.

Tensors are [B], one number per response.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import SupportsFloat

import torch
from torch import Tensor

from rlhf_suite.registry import step_aggregate
from rlhf_suite.shapes import same_shape

ROUNDING = 1e-6  # of the largest: scores that differ by less are equal but for the rounding of float32


def normalize_scores(scores: Tensor, mean: float, std: float) -> Tensor:
    """(score - mean) / std with the constants of a reward model's last evaluation."""
    return (scores - mean) / max(std, ROUNDING * abs(mean), 1e-8)


def standardize(scores: Sequence[float]) -> list[float]:
    """(score - mean) / deviation over all of them, with the unbiased deviation; scores that agree are all 0."""
    mean = math.fsum(scores) / len(scores)
    if are_equal(scores):
        return [0.0] * len(scores)
    variance = math.fsum((score - mean) ** 2 for score in scores) / (len(scores) - 1)
    return [(score - mean) / math.sqrt(variance) for score in scores]


def are_equal(scores: Sequence[float]) -> bool:
    """Return whether scores differ by rounding alone."""
    return max(scores) - min(scores) <= ROUNDING * max(map(abs, scores))


def clip_scores(scores: Tensor, clip_range: Sequence[float]) -> Tensor:
    """Clamp to `reward.clip_range` [low, high].

    It comes before any baseline: what is clipped is the score, not its difference to others (other systems clip the
    difference, so that their range means something else for each estimator).
    """
    low, high = clip_range
    return scores.clamp(low, high)


def overlong_penalty(lengths: Tensor, longest: Tensor, buffer: int, factor: float) -> Tensor:
    """Soft overlong punishment (DAPO, Yu et al. 2025): 0 up to longest - buffer, then linear, `factor` at `longest`.

    `lengths`: tokens the model wrote (what an environment wrote costs nothing); `longest`: the most it could have.
    """
    same_shape(lengths, longest)
    excess = (lengths - (longest - buffer)).clamp(0, buffer)
    return factor * excess / buffer


def stop_properly(rewards: Tensor, truncated: Tensor, coef: float) -> Tensor:
    """Rewards of truncated responses times `coef` in [0, 1], or replaced by a negative `coef` (ProRL v2, 2025)."""
    same_shape(rewards, truncated)
    penalised = rewards * coef if coef >= 0 else torch.full_like(rewards, coef)
    return torch.where(truncated, penalised, rewards)


def teaches(scores: Sequence[float], low: float, high: float, min_std: float) -> bool:
    """Whether a group's mean score is strictly between `low` and `high` (DAPO, Yu et al. 2025), and its scores differ:
    their deviation (biased) is above `min_std`. A group that agrees has no advantages, whatever its mean.
    """
    mean = math.fsum(scores) / len(scores)
    deviation = math.sqrt(math.fsum((score - mean) ** 2 for score in scores) / len(scores))
    return low < mean < high and not are_equal(scores) and deviation > min_std


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


def aggregate(scores: Sequence[float], name: str) -> float:
    """Return a solution's score from P(good) of each of its steps; 0 for one without steps: nothing in it is good."""
    if not scores:
        return 0.0
    score = step_aggregate.load(name)(scores)
    if not isinstance(score, SupportsFloat):
        raise step_aggregate.wrong_result(name, score, "a number")
    return float(score)


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
