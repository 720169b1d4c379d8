"""The example with the formulas of OpenRLHF's fork for asynchronous agents, by hand and by identity."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from given import prompt
from rlhf_suite.algo.advantage import Credit, CreditInput, assign_credit, whiten
from rlhf_suite.config.declarations.algo import AdvantageConfig
from rlhf_suite.data.ending import Ending
from rlhf_suite.data.trajectory import Trajectory
from rlhf_suite.errors import UserError
from rlhf_suite.registry import estimator, group_filter, prompt_filter
from rlhf_suite.rl.filtering import Candidate
from rlhf_suite.rl.samples import ScoredTrajectories

FORK = Path(__file__).parents[2] / "experiments" / "own_code" / "async_fork.py"


def inputs(rewards, lengths, groups, kl_penalty=None) -> CreditInput:
    return CreditInput(
        rewards=torch.tensor(rewards, dtype=torch.float64),
        kl_penalty=torch.tensor(kl_penalty or [0.0] * sum(lengths), dtype=torch.float64),
        lengths=torch.tensor(lengths),
        groups=torch.tensor(groups),
    )


def run(name: str, given: CreditInput, **options) -> Credit:
    return assign_credit(given, AdvantageConfig(estimator=f"{FORK}:{name}", **options))


def test_dpg_is_the_log_of_target_over_policy_less_its_mean_in_the_group():
    """Weights log 3 - log 2 and 0; a KL of log 2 is a penalty of 0.01 log 2. A row without tokens is not in it."""
    kl = [0.01 * math.log(2), 0, 0, 0]
    given = inputs([0.01 * math.log(3), 0, 5, 0.01 * math.log(4)], [1, 2, 0, 1], [3, 3, 3, 1], kl)
    given = replace(given, kl_coef=0.01)
    first, second = math.log(3 / 2), 0.0
    mean = math.log((math.exp(first) + math.exp(second)) / 2)
    wanted = [first - mean, second - mean, second - mean, 0]
    assert run("dpg", given).advantages.tolist() == pytest.approx(wanted)


def test_dpg_takes_the_beta_of_the_kl_penalty_and_refuses_to_work_without_one():
    """Twice the beta, rewards and penalties are the same weights."""
    given = inputs([0.5, 0.25, 1.0], [1, 2, 1], [0, 0, 0], [0.1, 0.0, 0.2, 0.3])
    once = run("dpg", replace(given, kl_coef=0.05))
    twice = replace(given, rewards=2 * given.rewards, kl_penalty=2 * given.kl_penalty, kl_coef=0.1)
    assert torch.allclose(run("dpg", twice).advantages, once.advantages)
    assert not torch.allclose(run("dpg", replace(given, kl_coef=0.1)).advantages, once.advantages)
    with pytest.raises(UserError, match="needs the beta of a KL penalty"):
        run("dpg", given)


def test_no_mean_whitens_whole_rewards():
    given = inputs([1.0, 0.0, 0.5], [1, 2, 1], [0, 0, 1])
    whole = torch.tensor([1, 0, 0, 0.5], dtype=torch.float64)
    assert torch.equal(run("no_mean", given).advantages, whiten(whole, no_std_norm=False))
    assert run("no_mean", given).returns.tolist() == whole.tolist()


def test_a_positive_gamma_discounts_right_answers_alone():
    given = inputs([1.0, 0.25], [3, 2], [0, 0], [0.0, 0.0, 0.0, 0.5, 0.0])
    assert run("positive_gamma", given, gamma=0.5).returns.tolist() == [0.25, 0.5, 1, -0.25, 0.25]
    plain = assign_credit(given, AdvantageConfig(estimator="reinforce"))
    assert torch.equal(run("positive_gamma", given, gamma=1.0).advantages, plain.advantages)


def test_responses_are_whitened_among_those_of_about_their_length():
    """Lengths below and above 1000 tokens; the two bins have rewards of different size."""
    given = inputs([1.0, 0.0, 90.0, 10.0], [3, 2, 1500, 1200], [0, 0, 1, 1])
    short, long = run("whitened_by_length", given).advantages.split([5, 2700])
    for part in (short, long):
        assert part.mean().item() == pytest.approx(0, abs=1e-9) and part.std(correction=0).item() == pytest.approx(1)
    one_bin = inputs([1.0, 0.0, 9.0, 1.0], [3, 2, 4, 5], [0, 0, 1, 1])
    plain = assign_credit(one_bin, AdvantageConfig(estimator="reinforce_baseline"))
    assert torch.equal(run("whitened_by_length", one_bin).advantages, plain.advantages)


def test_the_entropy_bonus_is_bounded_by_half_the_advantage():
    """GRPO's advantages are 1, -1 and 0 over the root of 2; 0.1 x entropy is 0.05, 0.5 and 0.2."""
    given = inputs([1.0, 0.0, 0.5], [1, 1, 1], [0, 0, 1])
    given = replace(given, entropies=torch.tensor([0.5, 5.0, 2.0], dtype=torch.float64))
    half = 0.5**0.5
    assert run("entropy_shaped", given).advantages.tolist() == pytest.approx([half + 0.05, -half + half / 2, 0])
    assert estimator.needs(f"{FORK}:entropy_shaped", "entropies")


def group(responses, truncated=()) -> ScoredTrajectories:
    trajectories = [Trajectory.start(prompt(ids=[1]), 0, sample) for sample in range(len(responses))]
    for sample, t in enumerate(trajectories):
        t.ending = Ending.CUT if sample in truncated else Ending.FINISHED
    zeros, texts = np.zeros(len(responses), np.float32), [""] * len(responses)
    return ScoredTrajectories(trajectories, zeros, zeros, list(responses), texts)


def test_a_group_with_one_response_that_repeats_itself_is_left_out():
    fine = ["one two three four", "five six seven eight nine", "ten eleven twelve", "a b c d e f"]
    outliers = group_filter.load(f"{FORK}:outliers")
    assert outliers(group(fine)) is None
    assert outliers(group([*fine, "so it is so it is so it is so it is"])) == "a response repeats itself"
    assert outliers(group(["so it is so it is so it is"] * 4)) is None, "none stands out"
    assert outliers(group(["", "a", "a b"])) is None


def test_a_group_whose_responses_are_mostly_cut_is_left_out():
    too_long = group_filter.load(f"{FORK}:too_long")
    assert too_long(group(["a"] * 4, truncated=[0, 1])) is None
    assert too_long(group(["a"] * 4, truncated=[0, 1, 3])) == "most responses are cut"


def candidate(*history) -> Candidate:
    return Candidate(prompt(), history)


def test_prompts_that_are_neither_too_hard_nor_too_easy_are_sampled():
    """Ten groups of eight say enough for the draws to be close to 0, 1/2, 1 and 1/2."""
    easy, hard, half = ([[score] * 8] * 10 for score in (1.0, 0.0, 0.0))
    half = [[1.0] * 4 + [0.0] * 4] * 10
    candidates = [candidate(*hard), candidate(*half), candidate(*easy), candidate(*half)]
    mopps = prompt_filter.load(f"{FORK}:mopps")
    for seed in range(20):
        assert sorted(mopps(candidates, np.random.default_rng(seed))) == [1, 3]
    assert {*mopps([candidate()] * 5, np.random.default_rng(0))} <= {*range(5)}
    assert len(mopps([candidate()] * 5, np.random.default_rng(0))) == 3, "half of them, rounded up"


def test_what_is_known_of_a_prompt_fades():
    module = prompt_filter.load(f"{FORK}:mopps").__globals__
    assert module["posterior"]([[1.0, 1.0, 0.0], [0.0, 0.0, 1.0]]) == pytest.approx((1 + 0.9 * 2 + 1, 1 + 0.9 * 1 + 2))
