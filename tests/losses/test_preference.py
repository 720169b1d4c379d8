"""Pair losses by hand: values, gradients at extremes, what is not counted, metrics that add up."""

from __future__ import annotations

import math

import pytest
import torch

from rlhf_suite.config.declarations.algo import AlgoConfig
from rlhf_suite.distributed.mesh import Mesh
from rlhf_suite.distributed.world import World
from rlhf_suite.losses.preference import Answers, preference_term, reward_term
from rlhf_suite.losses.reduce import log1mexp
from rlhf_suite.registry import preference_loss


def answers(log_probs, reference=0.0, tokens=4.0):
    values = torch.tensor(log_probs, dtype=torch.float64, requires_grad=True)
    return Answers(values, torch.full_like(values, reference).detach(), torch.full_like(values, tokens).detach())


def one(name, chosen, rejected, **config):
    return float(
        preference_loss.load(name)(
            answers([chosen]), answers([rejected]), AlgoConfig.of("dpo", loss=name, **config)
        ).detach()
    )


@pytest.mark.notices(
    "SimPO's log-probs are not divided by lengths",
    "losses/preference.py",
    "    gap = chosen.mean_log_probs - rejected.mean_log_probs",
    "    gap = chosen.log_probs - rejected.log_probs",
)
def test_each_loss_by_hand():
    assert one("sigmoid", -2.0, -5.0) == pytest.approx(math.log(1 + math.exp(-0.3)))
    smoothed = 0.8 * math.log(1 + math.exp(-0.3)) + 0.2 * math.log(1 + math.exp(0.3))
    assert one("sigmoid", -2.0, -5.0, label_smoothing=0.2) == pytest.approx(smoothed)
    assert one("ipo", -2.0, -5.0) == pytest.approx((3 - 5) ** 2)
    assert one("hinge", -2.0, -5.0) == pytest.approx(0.7)
    assert one("hinge", -2.0, -15.0) == 0
    assert one("simpo", -2.0, -5.0, beta=2.0, simpo_gamma=0.5) == pytest.approx(math.log(1 + math.exp(-(1.5 - 0.5))))
    odds = [math.exp(x / 4) / (1 - math.exp(x / 4)) for x in (-2.0, -5.0)]
    ratio = math.log(odds[0] / odds[1])
    assert one("orpo", -2.0, -5.0, beta=0.3) == pytest.approx(0.3 * math.log(1 + math.exp(-ratio)))


@pytest.mark.parametrize("name", preference_loss.names())
@pytest.mark.parametrize("gap", [-1e3, 0.0, 1e3])
def test_losses_and_gradients_are_finite_at_extremes(name, gap):
    chosen, rejected = answers([min(gap, 0.0)]), answers([min(-gap, 0.0)])
    config = AlgoConfig.of("dpo", loss=name, label_smoothing=0.1)
    loss = preference_term(chosen, rejected, torch.ones(1), config).total
    gradients = torch.autograd.grad(loss, [chosen.log_probs, rejected.log_probs])
    assert all(torch.isfinite(value).all() for value in (loss, *gradients))


def test_the_reference_counts_as_a_difference():
    config = AlgoConfig.of("dpo")
    moved = preference_term(answers([-2.0], -1.0), answers([-5.0], -3.0), torch.ones(1), config)
    plain = preference_term(answers([-1.0]), answers([-2.0]), torch.ones(1), config)
    assert float(moved.total) == pytest.approx(float(plain.total))


def test_the_nll_term_is_the_mean_token_loss_of_the_chosen_answer():
    pair = answers([-2.0, -6.0]), answers([-5.0, -1.0])
    with_term, without = (
        preference_term(*pair, torch.ones(2), AlgoConfig.of("dpo", nll_loss_coef=coef)).total for coef in (0.5, 0.0)
    )
    assert float(with_term - without) == pytest.approx(0.5 * (2 / 4 + 6 / 4))


def test_an_uncounted_pair_weighs_nothing_even_if_it_is_not_finite():
    chosen, rejected = answers([-2.0, math.nan]), answers([-5.0, -1.0])
    result = preference_term(chosen, rejected, torch.tensor([1.0, 0.0]), AlgoConfig.of("dpo"))
    assert float(result.total) == pytest.approx(math.log(1 + math.exp(-0.3)))
    assert {float(mean.count) for mean in result.metrics.values()} == {1.0}
    assert float(result.metrics["chosen_reward"].total) == pytest.approx(-0.2)


@pytest.mark.notices(
    "a margin makes the task easier",
    "losses/preference.py",
    "-F.logsigmoid(chosen - rejected - margin)",
    "-F.logsigmoid(chosen - rejected + margin)",
)
def test_reward_losses_by_hand():
    chosen, rejected, margin = torch.tensor([2.0, 0.0]), torch.tensor([1.0, 0.5]), torch.tensor([0.5, 0.0])
    result = reward_term(chosen, rejected, margin, torch.ones(2), "sigmoid")
    assert float(result.total) == pytest.approx(math.log(1 + math.exp(-0.5)) + math.log(1 + math.exp(0.5)))
    values = World(0, Mesh(1), torch.device("cpu")).combine({name: m.exact() for name, m in result.metrics.items()})
    assert values["acc"] == 0.5 and values["chosen_reward"] == 1.0 and values["reject_reward"] == 0.75
    assert values["reward_margin"] == 0.25
    assert values["reward_mean"] == pytest.approx(3.5 / 4)
    assert values["reward_std"] == pytest.approx(math.sqrt(5.25 / 4 - (3.5 / 4) ** 2))
    assert (values["reward_p05"], values["reward_p50"], values["reward_p95"]) == pytest.approx((0.075, 0.75, 1.85))


def test_the_metrics_of_a_pair_say_margin_and_log_probs():
    chosen, rejected = answers([-2.0, -6.0]), answers([-5.0, -1.0])
    metrics = preference_term(chosen, rejected, torch.tensor([1.0, 0.0]), AlgoConfig.of("dpo")).metrics
    assert float(metrics["chosen_logps"].total) == -2.0 and float(metrics["reject_logps"].total) == -5.0
    margin = metrics["chosen_reward"].total - metrics["reject_reward"].total
    assert float(metrics["reward_margin"].total) == pytest.approx(float(margin)) != 0


@pytest.mark.notices(
    "a tie of two answers counts as right",
    "losses/preference.py",
    "0.5 * (chosen == rejected)",
    "1.0 * (chosen == rejected)",
)
@pytest.mark.notices(
    "a tie of two answers counts as wrong",
    "losses/preference.py",
    "0.5 * (chosen == rejected)",
    "0.0 * (chosen == rejected)",
)
def test_a_tie_counts_half_as_in_the_area_under_the_curve():
    """So a policy that is its own reference, or a head of zeros, has 0.5 before it is trained."""
    same = answers([-2.0, -3.0])
    metrics = preference_term(same, same, torch.ones(2), AlgoConfig.of("dpo")).metrics
    assert float(metrics["acc"].total) == 1 and float(metrics["acc"].count) == 2
    scores = reward_term(torch.zeros(2), torch.zeros(2), torch.zeros(2), torch.ones(2), "sigmoid").metrics
    assert float(scores["acc"].total) == 1 and float(scores["acc"].count) == 2


@pytest.mark.parametrize("kind", ["sigmoid", "logexp"])
def test_a_gap_of_a_hundred_overflows_neither_loss(kind):
    chosen = torch.tensor([-100.0, 100.0], requires_grad=True)
    loss = reward_term(chosen, torch.zeros(2), torch.zeros(2), torch.ones(2), kind).total
    assert float(loss) == pytest.approx(100.0)
    assert torch.autograd.grad(loss, chosen)[0].tolist() == pytest.approx([-1.0, 0.0])


def test_log1mexp_is_exact_near_zero_and_far_from_it():
    """In float32, where each of both formulas is wrong at one end."""
    x = torch.tensor([-1e-6, -1e-3, -0.1, -0.693, -5.0, -20.0])
    torch.testing.assert_close(log1mexp(x).double(), torch.log1p(-torch.exp(x.double())), rtol=1e-6, atol=0)
