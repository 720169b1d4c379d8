"""From the raw score of a response to the reward the estimators see. All [B]."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def normalize_scores(scores: Tensor, mean: float, std: float) -> Tensor:
    """(score - mean) / std with the constants of a reward model's last evaluation."""
    return (scores - mean) / max(std, 1e-8)


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
    excess = (lengths - (longest - buffer)).clamp(0, buffer)
    return factor * excess / buffer


def stop_properly(rewards: Tensor, truncated: Tensor, coef: float) -> Tensor:
    """Rewards of truncated responses times `coef` in [0, 1], or replaced by a negative `coef` (ProRL v2, 2025)."""
    penalised = rewards * coef if coef >= 0 else torch.full_like(rewards, coef)
    return torch.where(truncated, penalised, rewards)
