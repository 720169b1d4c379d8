"""What a process reward model minimises: cross-entropy of the reward token at every step. Unit: steps."""

from __future__ import annotations

import torch
from torch import Tensor

from rlhf_suite.losses.metrics import Mean, Ranking
from rlhf_suite.losses.reduce import LossSum


def step_loss(logits: Tensor, targets: Tensor, weights: Tensor) -> LossSum:
    """Sum over N steps of -(w log p(target) + (1 - w) log p(the other)) for `logits` [N, R] of the R reward tokens.

    `targets` [N] int64, `weights` [N]; w < 1 only where R = 2. Metrics, means over steps: `loss`; `acc`, the share
    where the likeliest reward token is the one with the larger label.
    """
    log_probs = logits.log_softmax(-1)  # [N, R]
    others = (1 - targets).clamp(min=0)
    chosen, other = (log_probs.gather(1, index[:, None]).squeeze(1) for index in (targets, others))  # [N]
    losses = -(weights * chosen + torch.where(weights < 1, (1 - weights) * other, 0))
    right = (log_probs.argmax(-1) == wanted(targets, weights)).float()
    return LossSum(
        losses.sum(), {"loss": Mean(losses.detach().sum(), len(losses)), "acc": Mean(right.sum(), len(right))}
    )


def wanted(targets: Tensor, weights: Tensor) -> Tensor:
    """The reward token with the larger label, [N]."""
    return torch.where(weights >= 0.5, targets, 1 - targets)


def step_ranking(logits: Tensor, targets: Tensor, weights: Tensor) -> Ranking:
    """Of N steps by the probability of the first reward token, which is the good one: whether wrong steps have less of
    it. Most steps of most data are right, so that `acc` is high for a judge who calls all of them right."""
    return Ranking(logits.detach().softmax(-1)[:, 0], wanted(targets, weights) == 0)
