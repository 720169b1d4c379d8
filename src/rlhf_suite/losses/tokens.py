"""Losses of single tokens: next-token prediction, the critic's values, and the reward tokens of steps.

Shapes: T tokens laid end to end, N steps. Each is a sum over its units, with metrics as means over them.
"""

from __future__ import annotations

import torch
from torch import Tensor

from rlhf_suite.config.declarations.models import CriticConfig
from rlhf_suite.losses.metrics import Mean, Ranking
from rlhf_suite.losses.reduce import LossSum, masked_mean, masked_sum
from rlhf_suite.shapes import same_shape


def next_token_loss(log_probs: Tensor, mask: Tensor, weights: Tensor | None = None) -> LossSum:
    """Return the sum over masked tokens of -log p(token | earlier tokens of its sequence), in nats.

    `log_probs` [T], `mask` [T] of 0 and 1, `weights` [T] of each token's loss (None: 1). Unit: masked tokens. Metric:
    `gpt_loss`, the mean per masked token without its weight.
    """
    same_shape(log_probs, mask)
    losses = -log_probs if weights is None else -log_probs * weights
    return LossSum(masked_sum(losses, mask), {"gpt_loss": masked_mean(-log_probs, mask)})


def value_loss(values: Tensor, old_values: Tensor, returns: Tensor, mask: Tensor, clip: tuple[float, float]) -> LossSum:
    """Return the sum over masked tokens of 0.5 max((V - G)^2, (clip(V, V_old - low, V_old + high) - G)^2).

    Unit: masked tokens. All [T]; `clip` is (low, high): `critic.value_clip`, and `critic.value_clip_high` where it is
    set. The maximum makes the clip pessimistic, as PPO's reference code does. Two widths are the value's counterpart of
    DAPO's clip-higher (Yu et al. 2025): a critic that starts too low may rise faster than it may fall.
    Metrics over masked tokens: `critic_loss`, `values` (mean V).
    """
    low, high = clip
    same_shape(values, old_values, returns, mask)
    clipped = old_values + (values - old_values).clamp(-low, high)  # [T]
    losses = 0.5 * torch.maximum((values - returns).square(), (clipped - returns).square())
    metrics = {"critic_loss": masked_mean(losses, mask), "values": masked_mean(values, mask)}
    return LossSum(masked_sum(losses, mask), metrics)


def value_range(config: CriticConfig) -> tuple[float, float]:
    """Return how far a value may fall and rise before it is clipped."""
    high = config.value_clip if config.value_clip_high is None else config.value_clip_high
    return config.value_clip, high


def step_loss(logits: Tensor, targets: Tensor, weights: Tensor) -> LossSum:
    """Return the sum over N steps of -(w log p(target) + (1 - w) log p(the other)).

    `logits` [N, R] are those of the R reward tokens, `targets` [N] int64, `weights` [N]; w < 1 only where R = 2.
    Metrics, means over steps: `loss`; `acc`, the share where the likeliest reward token is the one with the larger
    label.
    """
    same_shape(targets, weights, logits[:, 0])
    log_probs = logits.log_softmax(-1)  # [N, R]
    others = (1 - targets).clamp(min=0)
    chosen, other = (log_probs.gather(1, index[:, None]).squeeze(1) for index in (targets, others))  # [N]
    losses = -(weights * chosen + torch.where(weights < 1, (1 - weights) * other, 0))
    right = (log_probs.argmax(-1) == hard_targets(targets, weights)).float()
    return LossSum(
        losses.sum(), {"loss": Mean(losses.detach().sum(), len(losses)), "acc": Mean(right.sum(), len(right))}
    )


def hard_targets(targets: Tensor, weights: Tensor) -> Tensor:
    """Return the reward token with the larger label, [N]."""
    return torch.where(weights >= 0.5, targets, 1 - targets)


def step_ranking(logits: Tensor, targets: Tensor, weights: Tensor) -> Ranking:
    """Return the AUC of telling right from wrong steps by P(good), the probability of the first reward token, over N
    steps. Most steps of most data are right, so `acc` is high even for a judge that calls all of them right."""
    is_right = hard_targets(targets, weights) == 0
    return Ranking(logits.detach().softmax(-1)[:, 0], is_right, torch.ones_like(is_right))
