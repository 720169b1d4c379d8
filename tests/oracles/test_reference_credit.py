"""Advantages and KL controllers agree with independent implementations; where one differs, the test says why.

On purpose different:
    gaps         OpenRLHF and TRL let discounts, lambda and bootstrapping run through the turns of an environment
                 (their values there are 0); ours and verl's skip them.
    empty rows   OpenRLHF, verl and TRL count a row without tokens in its group's baseline; ours does not.
    whitening    verl divides by the unbiased deviation (N - 1), OpenRLHF and ours by the biased one.
    group norm   verl adds 1e-6, TRL 1e-4 to the deviation, OpenRLHF and ours 1e-9.
    rloo + KL    TRL subtracts the whole sequence's KL from the score before the baseline; OpenRLHF and ours charge it
                 per token after the baseline.
"""

from __future__ import annotations

import pytest
import torch
from reference import Case, cases, check, gap

from rlhf_suite.algo.advantage import Credit, CreditInput, assign_credit
from rlhf_suite.algo.kl import AdaptiveKL, estimate_kl
from rlhf_suite.algo.scores import overlong_penalty, stop_properly
from rlhf_suite.config.declarations.algo import AdvantageConfig

LAMBDA = 0.95
FULL = ("contiguous", "gaps")


def credit(case: Case, estimator: str, gamma: float = 1.0, beta: float = 0.0) -> Credit:
    """Ours on a case, with one reward per row and a k1 penalty."""
    mask = case.fields["mask"]
    penalty = beta * estimate_kl(case.fields["old_logp"], case.fields["ref_logp"], "k1") * mask
    return run(case, estimator, case.fields["rewards"], penalty, gamma)


def token_credit(case: Case, estimator: str, gamma: float = 1.0) -> Credit:
    """Ours with a reward at every token: a negative penalty."""
    penalty = -case.fields["token_rewards"]
    return run(case, estimator, torch.zeros(8, dtype=torch.float64), penalty, gamma)


def row_credit(case: Case, estimator: str) -> Credit:
    """Ours with the sum of a row's token rewards as its one reward."""
    rewards = (case.fields["token_rewards"] * case.fields["mask"]).sum(1)
    return run(case, estimator, rewards, torch.zeros_like(case.fields["mask"]), 1.0)


def run(case: Case, estimator: str, rewards: torch.Tensor, penalty: torch.Tensor, gamma: float) -> Credit:
    """The references' rows are padded [8, 10]; ours are tokens of the model laid end to end."""
    fields = case.fields
    own = fields["mask"].bool()
    given = CreditInput(
        rewards,
        penalty[own],
        own.sum(1),
        fields["group"].long(),
        values=fields["values"][own],
        greedy=fields["baseline"],
    )
    found = assign_credit(given, AdvantageConfig(estimator=estimator, gamma=gamma, lambd=LAMBDA))
    padded = torch.zeros_like(fields["mask"])
    return Credit(padded.masked_scatter(own, found.advantages), padded.masked_scatter(own, found.returns))


def check_credit(ours: Credit, case: Case) -> None:
    check(ours.advantages, case.outputs["advantages"], case.fields["mask"])
    check(ours.returns, case.outputs.get("returns", case.outputs["advantages"]), case.fields["mask"])


# OpenRLHF


@pytest.mark.parametrize(
    ("estimator", "gamma", "beta", "kinds"),
    [
        ("gae", 1.0, 0.0, ("contiguous", "empty row")),
        ("gae", 1.0, 0.05, ("contiguous", "empty row")),
        ("gae", 0.9, 0.0, ("contiguous", "empty row")),
        ("gae", 0.9, 0.05, ("contiguous", "empty row")),
        ("reinforce", 1.0, 0.0, ("contiguous", "gaps", "empty row")),
        ("reinforce", 1.0, 0.05, ("contiguous", "gaps", "empty row")),
        ("reinforce", 0.9, 0.0, ("contiguous", "empty row")),
        ("reinforce", 0.9, 0.05, ("contiguous", "empty row")),
        ("rloo", 1.0, 0.0, FULL),
        ("rloo", 1.0, 0.05, FULL),
        ("reinforce_baseline", 1.0, 0.0, FULL),
        ("reinforce_baseline", 1.0, 0.05, FULL),
        ("dr_grpo", 1.0, 0.0, FULL),
        ("dr_grpo", 1.0, 0.05, FULL),
        ("group_norm", 1.0, 0.0, FULL),
        ("group_norm", 1.0, 0.05, FULL),
        ("flash_reinforce", 1.0, 0.0, FULL),
        ("flash_reinforce", 1.0, 0.05, FULL),
    ],
)
def test_estimators_agree_with_openrlhf(estimator, gamma, beta, kinds):
    for case in cases(f"openrlhf/advantage/{estimator}/gamma={gamma}/kl={beta}", *kinds):
        check_credit(credit(case, estimator, gamma, beta), case)


@pytest.mark.parametrize(("estimator", "gamma", "beta"), [("gae", 0.9, 0.05), ("reinforce", 0.9, 0.05)])
def test_openrlhf_discounts_through_gaps(estimator, gamma, beta):
    for case in cases(f"openrlhf/advantage/{estimator}/gamma={gamma}/kl={beta}", "gaps"):
        ours = credit(case, estimator, gamma, beta)
        assert gap(ours.returns, case.outputs["returns"], case.fields["mask"]) > 0.05


@pytest.mark.parametrize("estimator", ["rloo", "group_norm", "dr_grpo"])
def test_openrlhf_counts_an_empty_row_in_its_own_group_only(estimator):
    for case in cases(f"openrlhf/advantage/{estimator}/gamma=1.0/kl=0.0", "empty row"):
        ours, mask = credit(case, estimator), case.fields["mask"]
        with_empty = case.fields["group"] == case.fields["group"][mask.sum(1) == 0]
        check(ours.advantages[~with_empty], case.outputs["advantages"][~with_empty], mask[~with_empty])
        assert gap(ours.advantages, case.outputs["advantages"], mask) > 0.05


# verl


@pytest.mark.parametrize(
    ("reference", "estimator", "gamma"),
    [
        ("verl/advantage/gae/gamma=1.0", "gae", 1.0),
        ("verl/advantage/gae/gamma=0.9", "gae", 0.9),
        ("verl/advantage/reinforce_plus_plus_g1", "reinforce", 1.0),
        ("verl/advantage/reinforce_plus_plus", "reinforce", 0.9),
    ],
)
def test_whitened_estimators_agree_with_verl_over_gaps_but_for_its_unbiased_variance(reference, estimator, gamma):
    for case in cases(reference):
        ours, mask = token_credit(case, estimator, gamma), case.fields["mask"]
        number = mask.sum()
        check(ours.returns, case.outputs["returns"], mask)
        check(ours.advantages * ((number - 1) / number).sqrt(), case.outputs["advantages"], mask)


def test_reinforce_baseline_agrees_with_verl_but_for_its_unbiased_variance():
    """verl whitens what ours returns, the reward less its group's mean at every token."""
    for case in cases("verl/advantage/reinforce_plus_plus_baseline", *FULL):
        ours, number = row_credit(case, "reinforce_baseline"), case.fields["mask"].sum()
        check(ours.advantages * ((number - 1) / number).sqrt(), case.outputs["advantages"], case.fields["mask"])


@pytest.mark.parametrize("kinds", [FULL, ("empty row",)])
def test_remax_agrees_with_verl(kinds):
    """The returns are what advantages are made of: less the baseline."""
    for case in cases("verl/advantage/remax", *kinds):
        check(token_credit(case, "remax").advantages, case.outputs["advantages"], case.fields["mask"])


@pytest.mark.parametrize("estimator", ["rloo", "dr_grpo", "opo"])
def test_group_estimators_agree_with_verl(estimator):
    for case in cases(f"verl/advantage/{estimator}", *FULL):
        check_credit(row_credit(case, estimator), case)


def test_group_norm_agrees_with_verl_within_its_epsilon():
    for case in cases("verl/advantage/grpo", *FULL):
        ours = row_credit(case, "group_norm")
        torch.testing.assert_close(ours.advantages, case.outputs["advantages"], rtol=2e-5, atol=1e-5)


# TRL


@pytest.mark.parametrize(("reference", "estimator"), [("grpo_none", "dr_grpo"), ("rloo", "rloo")])
def test_group_estimators_agree_with_trl(reference, estimator):
    for case in cases(f"trl/advantage/{reference}", *FULL):
        check(credit(case, estimator).advantages[:, 0], case.outputs["advantages"])


def test_group_norm_agrees_with_trl_within_its_epsilon():
    for case in cases("trl/advantage/grpo_group", *FULL):
        ours = credit(case, "group_norm").advantages[:, 0]
        torch.testing.assert_close(ours, case.outputs["advantages"], rtol=2e-3, atol=1e-5)


def test_trl_puts_the_kl_of_the_whole_sequence_before_the_rloo_baseline():
    for case in cases("trl/advantage/rloo_kl0.05", *FULL):
        ours = credit(case, "rloo", beta=0.05).advantages[:, 0]
        assert float((ours - case.outputs["advantages"]).abs().max()) > 1e-3


@pytest.mark.parametrize("gamma", [0.9, 1.0])
def test_gae_agrees_with_trl_without_gaps_and_not_over_them(gamma):
    reference = f"trl_1.12/advantage/gae/gamma={gamma}"
    for case in cases(reference, "contiguous", "empty row"):
        check(token_credit(case, "gae", gamma).returns, case.outputs["returns"], case.fields["mask"])
    for case in cases(reference, "gaps"):
        ours = token_credit(case, "gae", gamma)
        assert gap(ours.returns, case.outputs["returns"], case.fields["mask"]) > 0.05


# Penalties of length


def test_the_overlong_penalty_agrees():
    """The last 6 of 10 tokens cost up to 1."""
    for case in cases("openrlhf/length_penalty/overlong"):
        lengths = case.fields["lengths"]
        penalty = overlong_penalty(lengths, torch.full_like(lengths, 10), buffer=6, factor=1.0)
        check(case.fields["rewards"] - penalty, case.outputs["rewards"])


@pytest.mark.parametrize(("reference", "coef"), [("stop", 0.3), ("stop_neg", -0.5)])
def test_the_penalty_of_truncated_responses_agrees(reference, coef):
    for case in cases(f"openrlhf/length_penalty/{reference}"):
        check(stop_properly(case.fields["rewards"], case.fields["truncated"].bool(), coef), case.outputs["rewards"])


# KL controllers


@pytest.mark.parametrize("reference", ["openrlhf/adaptive_kl", "verl/adaptive_kl"])
def test_adaptive_kl_agrees(reference):
    for case in cases(reference):
        controller = AdaptiveKL(0.1, target=0.5, horizon=1000)
        for kl, coef in zip(case.fields["rewards"].tolist(), case.outputs["coef"], strict=True):
            controller.update(kl, 64)
            check(torch.tensor(controller.coef, dtype=torch.float64), coef)
