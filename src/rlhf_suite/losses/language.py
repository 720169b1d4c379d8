"""Next-token prediction: the loss of supervised fine-tuning and pre-training."""

from __future__ import annotations

from torch import Tensor

from rlhf_suite.losses.reduce import LossSum, masked_mean, masked_sum


def next_token_loss(log_probs: Tensor, mask: Tensor) -> LossSum:
    """sum over masked tokens of -log p(token | earlier tokens of its sequence), in nats. Unit: masked tokens.

    `log_probs` [T], `mask` [T] of 0 and 1. Metric: `gpt_loss`, the mean per masked token.
    """
    return LossSum(-masked_sum(log_probs, mask), {"gpt_loss": masked_mean(-log_probs, mask)})
