"""What the critic minimises: the clipped squared error of its values."""

from __future__ import annotations

import torch
from torch import Tensor

from rlhf_suite.losses.reduce import LossSum, masked_mean, masked_sum


def value_loss(values: Tensor, old_values: Tensor, returns: Tensor, mask: Tensor, clip: float) -> LossSum:
    """sum over masked tokens of 0.5 max((V - G)^2, (clip(V, V_old - c, V_old + c) - G)^2). Unit: masked tokens.

    All [T]; c is `critic.value_clip`. The maximum makes the clip pessimistic, as PPO's reference code does.
    Metrics over masked tokens: `critic_loss`, `values` (mean V).
    """
    clipped = old_values + (values - old_values).clamp(-clip, clip)  # [T]
    losses = 0.5 * torch.maximum((values - returns).square(), (clipped - returns).square())
    metrics = {"critic_loss": masked_mean(losses, mask), "values": masked_mean(values, mask)}
    return LossSum(masked_sum(losses, mask), metrics)
