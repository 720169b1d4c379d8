"""The clipped value loss by hand."""

from __future__ import annotations

import pytest
import torch

from rlhf_suite.config.declarations.models import CriticConfig
from rlhf_suite.losses.tokens import value_loss, value_range

ONE = torch.ones(1)


def one(value: float, old: float, target: float, high: float = 0.5) -> float:
    loss = value_loss(torch.tensor([value]), torch.tensor([old]), torch.tensor([target]), ONE, clip=(0.5, high))
    return loss.total.item()


def test_inside_the_clip_it_is_half_the_squared_error():
    assert one(1.25, 1.0, 3.0) == pytest.approx(0.5 * 1.75**2)


@pytest.mark.notices(
    "the value clip is left out", "losses/tokens.py", "(values - old_values).clamp(-low, high)", "(values - old_values)"
)
def test_a_step_beyond_the_clip_is_charged_as_if_it_had_stopped_there():
    assert one(3.0, 1.0, 3.0) == pytest.approx(0.5 * 1.5**2)


def test_the_larger_of_both_errors_counts():
    assert one(-1.0, 1.0, 3.0) == pytest.approx(0.5 * 4.0**2)


@pytest.mark.notices(
    "a value may not rise further than it may fall",
    "losses/tokens.py",
    "(values - old_values).clamp(-low, high)",
    "(values - old_values).clamp(-low, low)",
)
@pytest.mark.parametrize(
    ("value", "charged"),
    [(2.5, 2.5), (3.5, 3.0), (0.75, 0.75), (0.0, 0.5)],
    ids=["a rise within", "a rise beyond", "a fall within", "a fall beyond"],
)
def test_a_value_may_rise_further_than_it_may_fall(value, charged):
    """Old value 1, 0.5 down and 2 up; the target is beyond the clip on the side to which the value moved."""
    target = 9.0 if value > 1 else -9.0
    assert one(value, 1.0, target, high=2.0) == pytest.approx(0.5 * (charged - target) ** 2)


def test_the_gradient_ends_where_the_value_has_risen_or_fallen_too_far():
    values = torch.tensor([2.5, 3.5, 0.75, 0.0]).requires_grad_()
    returns = torch.tensor([9.0, 9.0, -9.0, -9.0])
    value_loss(values, torch.ones(4), returns, torch.ones(4), clip=(0.5, 2.0)).total.backward()
    assert values.grad is not None and values.grad.tolist() == [2.5 - 9, 0, 0.75 + 9, 0]


def test_one_number_bounds_both_sides_unless_there_is_a_second():
    assert value_range(CriticConfig.of("ppo", value_clip=0.3)) == (0.3, 0.3)
    assert value_range(CriticConfig.of("ppo", value_clip=0.3, value_clip_high=0.7)) == (0.3, 0.7)


def test_only_masked_tokens_count_and_get_gradients():
    values = torch.tensor([1.0, 2.0, 9.0]).requires_grad_()
    old, returns, mask = torch.tensor([1.0, 2.0, 9.0]), torch.tensor([0.0, 4.0, 0.0]), torch.tensor([1.0, 1.0, 0.0])
    loss = value_loss(values, old, returns, mask, clip=(0.5, 0.5))
    loss.total.backward()
    assert loss.total.item() == pytest.approx(0.5 + 2.0)
    assert values.grad is not None and values.grad.tolist() == [1.0, -2.0, 0.0]
    assert loss.metrics["critic_loss"].count == 2 and loss.metrics["values"].total == 3


def test_a_value_already_beyond_the_clip_gets_no_gradient_further_out():
    value = torch.tensor([2.0]).requires_grad_()
    value_loss(value, torch.tensor([1.0]), torch.tensor([2.1]), ONE, clip=(0.5, 0.5)).total.backward()
    assert value.grad is not None and value.grad.item() == 0
