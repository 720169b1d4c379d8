"""The next-token loss: minus the log-probs of the masked tokens."""

from __future__ import annotations

import math

import pytest
import torch

from rlhf_suite.losses.tokens import next_token_loss

LOG_PROBS = torch.tensor([0.0, math.log(0.5), math.log(0.25), math.log(0.1)])
MASK = torch.tensor([0.0, 1, 1, 0])


@pytest.mark.notices(
    "the mask is dropped from sums over tokens",
    "losses/reduce.py",
    "    return torch.where(mask.bool(), values, 0).sum()",
    "    return values.sum()",
)
def test_loss_is_the_sum_of_negative_log_probs_of_masked_tokens():
    loss = next_token_loss(LOG_PROBS, MASK)
    assert loss.total.item() == pytest.approx(3 * math.log(2))
    assert loss.metrics["gpt_loss"].total.item() == pytest.approx(3 * math.log(2))
    assert loss.metrics["gpt_loss"].count == 2


def test_a_uniform_model_has_log_vocabulary_size_as_mean_loss():
    loss = next_token_loss(torch.full((7,), -math.log(64)), torch.ones(7))
    assert loss.total.item() / 7 == pytest.approx(math.log(64))


def test_gradient_is_minus_one_on_masked_tokens_only():
    log_probs = LOG_PROBS.clone().requires_grad_()
    next_token_loss(log_probs, MASK).total.backward()
    assert log_probs.grad is not None and log_probs.grad.tolist() == [0, -1, -1, 0]
