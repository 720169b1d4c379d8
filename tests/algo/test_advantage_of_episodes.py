"""Rewards of turns, and episodes of several rows."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from credit_inputs import (
    ESTIMATORS,
    ROWS,
    inputs,
    random_inputs,
    run,
)

from rlhf_suite.algo.advantage import CreditInput
from rlhf_suite.errors import UserError

# Rewards of turns: row 0 earns 1 at its second token and 2 at its fourth beside R = 4, row 1 earns R = 3 alone.


def turns(**further) -> CreditInput:
    return inputs([4.0, 3.0], [4, 2], turn_rewards=[0, 1.0, 0, 2.0, 0, 0], **further)


@pytest.mark.notices(
    "rewards of turns wait for the end of the response",
    "algo/advantage.py",
    "    rewards = with_outcomes(inputs, inputs.rewards)\n"
    "    return rewards if inputs.turn_rewards is None else rewards + inputs.turn_rewards",
    "    return with_outcomes(inputs, whole_rewards(inputs))",
)
def test_reinforce_discounts_rewards_of_turns_from_where_they_stand():
    """2 + 4 = 6 at the last token; 3; 1 + 1.5 = 2.5; 1.25. The other row: 3; 1.5."""
    credit = run("reinforce", turns(), gamma=0.5, no_std_norm=True)
    assert credit.returns.tolist() == [1.25, 2.5, 3, 6, 1.5, 3]
    mean = 17.25 / 6
    assert credit.advantages.tolist() == pytest.approx([each - mean for each in (1.25, 2.5, 3, 6, 1.5, 3)])


def test_gae_has_rewards_of_turns_where_they_stand():
    """Deltas with gamma 0.5: 0.5 x 2 - 1 = 0; 1 + 0.5 x 4 - 2 = 1; 0.5 x 8 - 4 = 0; 6 - 8 = -2; weight 0.25."""
    given = turns(values=[1.0, 2.0, 4.0, 8.0, 0.0, 0.0])
    credit = run("gae", given, gamma=0.5, lambd=0.5, no_std_norm=True)
    third = 0.25 * -2
    second = 1 + 0.25 * third
    assert credit.returns[:4].tolist() == [0.25 * second + 1, second + 2, third + 4, -2 + 8]


@pytest.mark.notices(
    "baselines compare rewards without those of turns",
    "algo/advantage.py",
    "inputs.rewards.double() + episode_sum(",
    "inputs.rewards.double() + 0 * episode_sum(",
)
@pytest.mark.parametrize(
    ("name", "wanted"),
    [
        ("reinforce_baseline", 2),  # 7 against 3: the mean is 5
        ("dr_grpo", 2),
        ("flash_reinforce", 2),
        ("rloo", 4),
        ("group_norm", 0.5**0.5),  # 2 over the deviation, sqrt(2 x 4)
        ("opo", 7 - (7 * 4 + 3 * 2) / 6),
        ("remax", 7 - 2.5),
    ],
)
def test_a_baseline_compares_the_sums_of_all_rewards(name, wanted):
    """The KL penalty stays at its token: 0.25 at the second."""
    given = turns(greedy=[2.5, 2.5], kl_penalty=[0, 0.25, 0, 0, 0, 0])
    returns = run(name, given).returns
    assert returns[:4].tolist() == pytest.approx([wanted - 0.25, wanted - 0.25, wanted, wanted])


def test_on_policy_distillation_has_no_rewards_of_turns_either():
    assert not run("on_policy_distill", turns()).advantages.any()


@pytest.mark.parametrize("name", ESTIMATORS)
def test_turns_that_earn_nothing_change_no_bit(name):
    given = random_inputs()
    silent = replace(given, turn_rewards=torch.zeros_like(given.kl_penalty))
    one, other = run(name, silent), run(name, replace(given, turn_rewards=None))
    assert torch.equal(one.advantages, other.advantages) and torch.equal(one.returns, other.returns)


# Episodes of several rows


@pytest.mark.notices(
    "baselines count every row of an episode",
    "algo/advantage.py",
    "    return rows == first[index]",
    "    return written",
)
@pytest.mark.parametrize(
    ("name", "wanted"),
    [
        ("reinforce_baseline", [2, -2]),  # (5 + 1) / 2, where rows would have (5 + 5 + 1) / 3
        ("dr_grpo", [2, -2]),
        ("flash_reinforce", [2, -2]),
        ("rloo", [4, -4]),
        ("group_norm", [0.5**0.5, -(0.5**0.5)]),
        ("opo", [5 - 32 / 8, 1 - 32 / 8]),  # 7 tokens of the first: (5 x 6 + 1 x 2) / 8
    ],
)
def test_baselines_count_an_episode_once(name, wanted):
    """The first episode has four rows: the first without tokens of the model, the others with 3, 2 and 1."""
    given = inputs([5.0, 5.0, 1.0, 5.0, 5.0], [0, 3, 2, 2, 1], episodes=[8, 8, 3, 8, 8])
    credit = run(name, given)
    first, second = wanted
    assert credit.returns.tolist() == pytest.approx([first] * 3 + [second] * 2 + [first] * 3)


def test_rewards_of_turns_count_for_all_rows_of_their_episode():
    """4 + 1 + 2 = 7 against 3."""
    given = inputs([4.0, 4.0, 3.0], [2, 1, 1], episodes=[0, 0, 1], turn_rewards=[1.0, 0, 2.0, 0])
    assert run("dr_grpo", given).advantages.tolist() == [2, 2, 2, -2]


@pytest.mark.notices(
    "an estimator with a discount takes episodes whose order of tokens nobody knows",
    "algo/advantage.py",
    "if config.estimator in WITH_TIME and has_forks(inputs):",
    "if False:",
)
@pytest.mark.parametrize("name", ["gae", "reinforce"])
def test_an_estimator_with_a_discount_refuses_an_episode_of_several_rows(name):
    given = inputs([5.0, 5.0, 1.0], [1, 1, 2], episodes=[0, 0, 1], values=[0.5] * 4)
    with pytest.raises(UserError, match=rf"estimator={name}: .* which token of two ledgers came first is not known"):
        run(name, given)
    for one_row_each in (replace(given, episodes=None), replace(given, episodes=torch.tensor([2, 0, 1]))):
        assert len(run(name, one_row_each).advantages) == 4
    silent = inputs([5.0, 5.0, 1.0], [2, 0, 2], episodes=[0, 0, 1], values=[0.5] * 4)
    assert len(run(name, silent).advantages) == 4, "in the second row of the episode only a tool spoke"


def test_an_episode_alone_in_its_group_has_nothing_to_compare_with():
    given = inputs([5.0, 5.0], [1, 2], episodes=[1, 1])
    for name in ("reinforce_baseline", "rloo", "group_norm", "dr_grpo", "opo"):
        assert not run(name, given).returns.any()


@pytest.mark.parametrize("name", ESTIMATORS)
def test_episodes_of_one_row_each_change_no_bit(name):
    given = replace(random_inputs(), turn_rewards=None)
    named = replace(given, episodes=7 * torch.arange(ROWS).flip(0))
    one, other = run(name, named), run(name, given)
    assert torch.equal(one.advantages, other.advantages) and torch.equal(one.returns, other.returns)
