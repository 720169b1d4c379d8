"""The clipped value loss by hand."""

from __future__ import annotations

import pytest
import torch

from rlhf_suite.losses.tokens import value_loss

ONE = torch.ones(1)


def one(value: float, old: float, target: float) -> float:
    loss = value_loss(torch.tensor([value]), torch.tensor([old]), torch.tensor([target]), ONE, clip=0.5)
    return loss.total.item()


def test_inside_the_clip_it_is_half_the_squared_error():
    assert one(1.25, 1.0, 3.0) == pytest.approx(0.5 * 1.75**2)


def test_a_step_beyond_the_clip_is_charged_as_if_it_had_stopped_there():
    assert one(3.0, 1.0, 3.0) == pytest.approx(0.5 * 1.5**2)


def test_the_larger_of_both_errors_counts():
    assert one(-1.0, 1.0, 3.0) == pytest.approx(0.5 * 4.0**2)


def test_only_masked_tokens_count_and_get_gradients():
    values = torch.tensor([1.0, 2.0, 9.0]).requires_grad_()
    old, returns, mask = torch.tensor([1.0, 2.0, 9.0]), torch.tensor([0.0, 4.0, 0.0]), torch.tensor([1.0, 1.0, 0.0])
    loss = value_loss(values, old, returns, mask, clip=0.5)
    loss.total.backward()
    assert loss.total.item() == pytest.approx(0.5 + 2.0)
    assert values.grad is not None and values.grad.tolist() == [1.0, -2.0, 0.0]
    assert loss.metrics["critic_loss"].count == 2 and loss.metrics["values"].total == 3


def test_a_value_already_beyond_the_clip_gets_no_gradient_further_out():
    value = torch.tensor([2.0]).requires_grad_()
    value_loss(value, torch.tensor([1.0]), torch.tensor([2.1]), ONE, clip=0.5).total.backward()
    assert value.grad is not None and value.grad.item() == 0
