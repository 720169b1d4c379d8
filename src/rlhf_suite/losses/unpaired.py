"""KTO: single answers that are desirable or not, against a KL reference point (Ethayarajh et al., arXiv:2402.01306).

Shapes: B answers; unit: answers.
"""

from __future__ import annotations

import torch
from torch import Tensor

from rlhf_suite.config.algo_supervised import KTOAlgoConfig
from rlhf_suite.losses.metrics import Ranking
from rlhf_suite.losses.reduce import LossSum, counted_mean, counted_sum


def reference_point(total: Tensor, count: Tensor) -> Tensor:
    """z = max(0, mean log-ratio), without gradient; 0 where nothing was counted."""
    return (total / count.clamp(min=1)).clamp(min=0)


def kto_loss(log_ratios: Tensor, labels: Tensor, kl: Tensor, counted: Tensor, config: KTOAlgoConfig) -> LossSum:
    """Sum over counted answers, with r = log pi(y) - log pi_ref(y), of

        desirable (label 1)      w_d (1 - sigmoid(beta (r - z)))
        undesirable (label 0)    w_u (1 - sigmoid(beta (z - r)))

    All [B]; `kl` holds z, in which no gradient flows. Metrics: `loss`, `kl`, beta r of either class as `chosen_reward`
    and `reject_reward`, and `auc`: how often a desirable answer's r is above an undesirable one's.
    """
    desirable = labels > 0.5
    sign = torch.where(desirable, 1.0, -1.0)
    weights = torch.where(desirable, config.desirable_loss_weight, config.undesirable_loss_weight)
    losses = weights * torch.sigmoid(-config.beta * sign * (log_ratios - kl))  # 1 - sigmoid(x) = sigmoid(-x)
    rewards = config.beta * log_ratios.detach()
    return LossSum(
        counted_sum(losses, counted),
        {
            "loss": counted_mean(losses, counted),
            "kl": counted_mean(kl, counted),
            "chosen_reward": counted_mean(rewards, counted * desirable),
            "reject_reward": counted_mean(rewards, counted * ~desirable),
            "auc": Ranking(rewards[counted > 0], desirable[counted > 0]),
        },
    )
