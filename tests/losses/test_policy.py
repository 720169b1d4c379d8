"""The clipped surrogate by hand, its gradient where the clip holds and where not, and the signs of its companions."""

from __future__ import annotations

import math

import pytest
import torch

from rlhf_suite.config.actor import PolicyConfig
from rlhf_suite.losses.policy import POLICY_LOSSES, PolicyTokens, clip_range, entropy_term, kl_term, ppo_loss
from rlhf_suite.losses.reduce import LossSum, num_units, token_weights

CONFIG = PolicyConfig(eps_clip=0.2)


def run(ratios, advantages, config=CONFIG, mask=None):
    """The ppo loss and the gradient with respect to log pi of tokens with these probability ratios."""
    log_probs = torch.tensor(ratios, dtype=torch.float64).log().requires_grad_()
    chosen = torch.ones(len(ratios)) if mask is None else torch.tensor(mask)
    tokens = PolicyTokens(
        log_probs, torch.zeros(len(ratios)), torch.tensor(advantages, dtype=torch.float64), chosen, chosen
    )
    loss = POLICY_LOSSES["ppo"](tokens, config)
    (gradient,) = torch.autograd.grad(loss.total, log_probs)
    return loss, gradient


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "gradient"),
    [
        (1.0, 2.0, -2.0, -2.0),  # on policy: plain policy gradient
        (1.1, 2.0, -2.2, -2.2),  # inside the clip
        (1.5, 2.0, -2.4, 0.0),  # gone up far enough: 1.2 x 2, no gradient
        (0.5, 2.0, -1.0, -1.0),  # gone the wrong way: the clip must not hold it there
        (0.5, -2.0, 1.6, 0.0),  # gone down far enough: 0.8 x -2
        (1.5, -2.0, 3.0, 3.0),  # gone up although bad: full gradient
    ],
)
def test_ppo_clips_only_what_would_be_over_rewarded(ratio, advantage, loss, gradient):
    result, grad = run([ratio], [advantage])
    assert result.total.item() == pytest.approx(loss)
    assert grad.item() == pytest.approx(gradient)


def test_ppo_with_an_asymmetric_clip_uses_low_below_and_high_above():
    config = PolicyConfig(eps_clip=0.9, eps_clip_low_high=[0.2, 0.28])
    assert clip_range(config) == (0.2, 0.28) and clip_range(CONFIG) == (0.2, 0.2)
    result, _ = run([1.5, 0.5], [1.0, -1.0], config)
    assert result.total.item() == pytest.approx(-1.28 + 0.8)


def test_dual_clip_bounds_the_loss_of_negative_advantages_only():
    config = PolicyConfig(eps_clip=0.2, dual_clip=3.0)
    result, gradient = run([10.0, 2.0, 10.0], [-1.0, -1.0, 1.0], config)
    assert result.total.item() == pytest.approx(3.0 + 2.0 - 1.2)
    assert gradient.tolist() == pytest.approx([0.0, 2.0, 0.0])


def test_ppo_gradient_is_the_numerical_derivative():
    generator = torch.Generator().manual_seed(1)
    log_probs = (0.4 * torch.randn(20, generator=generator, dtype=torch.float64)).requires_grad_()
    advantages = torch.randn(20, generator=generator, dtype=torch.float64)
    config = PolicyConfig(eps_clip=0.2, dual_clip=3.0)
    ones = torch.ones(20, dtype=torch.float64)

    def loss(x):
        return ppo_loss(PolicyTokens(x, torch.zeros_like(ones), advantages, ones, ones), config).total

    assert torch.autograd.gradcheck(loss, (log_probs,))


def test_extreme_log_ratios_stay_finite():
    log_probs = torch.tensor([0.0, -100.0]).requires_grad_()
    old = torch.tensor([-100.0, 0.0])
    ones = torch.ones(2)
    loss = ppo_loss(PolicyTokens(log_probs, old, -ones, ones, ones), CONFIG)
    loss.total.backward()
    assert loss.total.item() == pytest.approx(math.exp(20), rel=1e-5)
    assert log_probs.grad is not None and log_probs.grad.isfinite().all()


def test_ppo_metrics_count_clipped_tokens_and_estimate_kl():
    result, _ = run([1.5, 0.5, 1.0, 9.0], [1.0, 1.0, 1.0, 1.0], mask=[1.0, 1.0, 1.0, 0.0])
    clipped, kl, loss = (result.metrics[name] for name in ("ppo_clip_ratio", "ppo_kl", "policy_loss"))
    assert clipped.total == 1 and clipped.count == 3
    assert kl.total.item() == pytest.approx(-math.log(1.5) - math.log(0.5)) and kl.count == 3
    assert loss.total.item() == pytest.approx(-1.2 - 0.5 - 1.0) and loss.count == 3
    assert not any(mean.total.requires_grad for mean in result.metrics.values())


def test_unmasked_tokens_never_reach_the_policy_gradient():
    masked, gradient = run([1.1, 1.1], [1.0, 5.0], mask=[1.0, 0.0])
    unmasked, _ = run([1.1, 1.1], [1.0, 5.0])
    assert masked.total.item() == pytest.approx(-1.1) and gradient.tolist() == pytest.approx([-1.1, 0.0])
    assert unmasked.total.item() == pytest.approx(-6.6)


def test_policy_loss_metric_is_the_mean_that_is_minimised_in_sequence_mode_too():
    mask, segments = torch.tensor([1.0, 1.0, 1.0]), torch.tensor([0, 0, 1])
    weights = token_weights(mask, segments, 2, "seq-mean-token-mean")
    tokens = PolicyTokens(torch.zeros(3), torch.zeros(3), torch.tensor([1.0, 3.0, 5.0]), mask, weights)
    loss = ppo_loss(tokens, CONFIG)
    assert loss.total == -(2 + 5)
    assert loss.metrics["policy_loss"].count == num_units(mask, segments, 2, "seq-mean-token-mean") == 2


def descend(loss: LossSum, leaf: torch.Tensor) -> torch.Tensor:
    """Which way gradient descent moves `leaf`."""
    (gradient,) = torch.autograd.grad(loss.total, leaf)
    return -gradient


def test_minimising_the_entropy_term_raises_entropy():
    entropy = torch.tensor([1.0, 2.0, 4.0]).requires_grad_()
    term = entropy_term(entropy, torch.tensor([1.0, 1.0, 0.0]), coef=0.5)
    assert term.total == -1.5 and term.metrics["entropy"].total == 3
    assert descend(term, entropy).tolist() == [0.5, 0.5, 0.0]


def test_minimising_the_kl_term_lowers_kl():
    kl = torch.tensor([1.0, 2.0, 4.0]).requires_grad_()
    term = kl_term(kl, torch.tensor([1.0, 1.0, 0.0]), coef=0.5)
    assert term.total == 1.5 and term.metrics["kl_loss"].total == 3 and term.metrics["kl_loss"].count == 2
    assert descend(term, kl).tolist() == [-0.5, -0.5, 0.0]
