"""From the raw score of a response to the reward the estimators see. All [B]."""

from __future__ import annotations

from collections.abc import Sequence

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
