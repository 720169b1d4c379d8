"""Every estimator by hand, by identity, with empty rows, rewards of turns and episodes of several rows."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from credit_inputs import (
    ESTIMATORS,
    ROWS,
    WHITENED,
    assert_same,
    chosen,
    float64,
    inputs,
    of_last_tokens,
    of_rows,
    random_inputs,
    run,
    tensors_of,
    without_kl,
)

from rlhf_suite.algo.advantage import CreditInput, clip_advantages, discounted_sums, whiten
from rlhf_suite.errors import UserError
from rlhf_suite.registry import estimator

# By hand


@pytest.mark.notices(
    "whitening leaves the mean where it is",
    "algo/advantage.py",
    "    centred = advantages - advantages.mean()",
    "    centred = advantages - 0 * advantages.mean()",
)
@pytest.mark.notices("GAE forgets lambda", "algo/advantage.py", "config.gamma * config.lambd)", "config.gamma)")
@pytest.mark.notices(
    "the reward stands at the first token of the row",
    "algo/advantage.py",
    "lengths.cumsum(0)[lengths > 0] - 1",
    "(lengths.cumsum(0) - lengths)[lengths > 0]",
)
@pytest.mark.notices(
    "rewards to go are not discounted", "algo/advantage.py", "        sums *= decay\n", "        sums *= 1\n"
)
def test_gae_by_hand():
    given = inputs([1.0], [3], values=[0.5, 0.25, 0.75])
    credit = run("gae", given, gamma=0.9, lambd=0.5, no_std_norm=True)
    third = 1.0 - 0.75
    second = 0.9 * 0.75 - 0.25 + 0.45 * third
    first = 0.9 * 0.25 - 0.5 + 0.45 * second
    raw = torch.tensor([first, second, third], dtype=float64)
    torch.testing.assert_close(credit.advantages, raw - raw.mean())
    torch.testing.assert_close(credit.returns, raw + given.values)


@pytest.mark.notices(
    "GAE bootstraps from the next row",
    "algo/advantage.py",
    "    result[last_tokens(lengths)] = 0",
    "    result[-1:] = 0",
)
def test_the_value_behind_a_row_is_0_and_not_that_of_the_next_row():
    """Deltas 0.9 x 4 - 2, 1 - 4 and 3 - 8; with lambda 0 returns are deltas + values."""
    credit = run("gae", inputs([1.0, 3.0], [2, 1], values=[2.0, 4.0, 8.0]), gamma=0.9, lambd=0.0)
    assert credit.returns.tolist() == [0.9 * 4, 1, 3]


def test_reinforce_by_hand():
    given = inputs([2.0], [3], kl_penalty=[0.5, 0.0, 0.25])
    credit = run("reinforce", given, gamma=0.5, no_std_norm=True)
    returns = torch.tensor([-0.5 + 0.5 * 0.875, 0.5 * 1.75, 1.75], dtype=float64)
    torch.testing.assert_close(credit.returns, returns)
    torch.testing.assert_close(credit.advantages, returns - returns.mean())


def test_reinforce_baseline_by_hand():
    credit = run("reinforce_baseline", inputs([1.0, 0.0, 0.5], [1, 1, 1], groups=[7, 7, 9]), no_std_norm=True)
    assert credit.advantages.tolist() == [0.5, -0.5, 0.0] and credit.returns.tolist() == [0.5, -0.5, 0.0]


@pytest.mark.notices(
    "the baseline is that of all groups together",
    "algo/advantage.py",
    "sum_by(inputs.groups, torch.where",
    "sum_by(torch.zeros_like(inputs.groups), torch.where",
)
@pytest.mark.notices(
    "leave-one-out leaves nothing out",
    "algo/advantage.py",
    "group_sum(rewards, inputs) - rewards  # [B] sum over the other episodes",
    "group_sum(rewards, inputs)",
)
def test_rloo_by_hand():
    credit = run("rloo", inputs([1.0, 0.0, 0.0, 4.0, 2.0], [2] * 5, groups=[3, 3, 3, 1, 1]))
    assert credit.advantages[::2].tolist() == pytest.approx([1.0, -0.5, -0.5, 2.0, -2.0])
    assert torch.equal(credit.advantages[::2], credit.advantages[1::2])


@pytest.mark.notices(
    "the deviation of a group is the biased one",
    "algo/advantage.py",
    "group_sum(centred.square(), inputs) / (group_sizes(inputs) - 1).clamp(min=1)",
    "group_sum(centred.square(), inputs) / group_sizes(inputs).clamp(min=1)",
)
def test_group_norm_by_hand():
    credit = run("group_norm", inputs([1.0, 0.0, 0.0, 1.0, 5.0, 5.0], [1] * 6, groups=[0, 0, 0, 0, 1, 1]))
    deviation = (4 * 0.25 / 3) ** 0.5
    wanted = [0.5 / deviation, -0.5 / deviation, -0.5 / deviation, 0.5 / deviation, 0, 0]
    assert credit.advantages.tolist() == pytest.approx(wanted)


def test_dr_grpo_by_hand():
    credit = run("dr_grpo", inputs([1.0, 0.0, 0.0, 0.0, 8.0, 6.0], [1] * 6, groups=[0, 0, 0, 0, 1, 1]))
    assert credit.advantages.tolist() == [0.75, -0.25, -0.25, -0.25, 1.0, -1.0]


# Identities


@pytest.mark.parametrize("gamma", [1.0, 0.8])
def test_gae_with_lambda_one_is_reward_to_go_less_value(gamma):
    given = random_inputs()
    gae = run("gae", given, gamma=gamma, lambd=1.0)
    reinforce = run("reinforce", given, gamma=gamma)
    torch.testing.assert_close(gae.returns, reinforce.returns)
    assert_same(run("gae", replace(given, values=torch.zeros_like(given.values)), gamma=gamma), reinforce)


def test_gae_with_lambda_zero_is_the_temporal_difference():
    given = inputs([1.0], [2], values=[0.5, 0.25])
    credit = run("gae", given, gamma=0.9, lambd=0.0)
    torch.testing.assert_close(credit.returns, torch.tensor([0.9 * 0.25, 1.0], dtype=float64))


def test_rloo_is_the_group_mean_baseline_times_n_over_n_minus_one():
    given = without_kl(random_inputs())
    sizes = torch.tensor([4, 4, 3] * 4).repeat_interleave(given.lengths)  # the empty row 5 is in group 2
    expected = run("dr_grpo", given).advantages * sizes / (sizes - 1)
    torch.testing.assert_close(run("rloo", given).advantages, expected)


@pytest.mark.parametrize("name", ["rloo", "dr_grpo", "group_norm"])
def test_group_advantages_sum_to_zero_in_each_group(name):
    given = without_kl(random_inputs())
    advantages = of_last_tokens(run(name, given), given)
    for group in range(3):
        mine = given.groups[given.lengths > 0] == group
        assert advantages[mine].sum().item() == pytest.approx(0, abs=1e-7)


def test_group_norm_has_unit_deviation_in_each_group():
    given = without_kl(random_inputs())
    advantages = of_last_tokens(run("group_norm", given), given)
    assert advantages[given.groups[given.lengths > 0] == 1].std().item() == pytest.approx(1)


@pytest.mark.parametrize("name", WHITENED)
def test_whitened_advantages_have_mean_zero_and_variance_one_over_model_tokens(name):
    given = random_inputs()
    advantages = run(name, given).advantages
    assert advantages.mean().item() == pytest.approx(0, abs=1e-12)
    assert advantages.var(correction=0).item() == pytest.approx(1)


@pytest.mark.parametrize("name", WHITENED)
def test_without_std_norm_only_the_mean_goes(name):
    given = random_inputs()
    plain, normed = (run(name, given, no_std_norm=flag).advantages for flag in (True, False))
    deviation = plain.std(correction=0)
    torch.testing.assert_close(plain, normed * deviation)
    assert plain.mean().item() == pytest.approx(0, abs=1e-12)


@pytest.mark.parametrize("name", ESTIMATORS)
def test_only_whitening_estimators_mix_groups(name):
    given = random_inputs()
    other = replace(given, rewards=torch.where(given.groups == 0, 3 * given.rewards + 1, given.rewards))
    untouched = (given.groups != 0).repeat_interleave(given.lengths)
    same = torch.equal(run(name, given).advantages[untouched], run(name, other).advantages[untouched])
    assert same == (name not in (*WHITENED, "flash_reinforce"))


def test_whitening_divides_by_the_deviation_which_has_a_floor():
    assert whiten(torch.tensor([0.0, 0.5], dtype=float64), no_std_norm=False).tolist() == pytest.approx([-1, 1])
    tiny = torch.tensor([0.0, 1e-5], dtype=float64)
    assert whiten(tiny, no_std_norm=False).tolist() == pytest.approx([-0.05, 0.05]), "divided by 1e-4"


def test_whitening_constant_advantages_gives_zeros():
    assert not whiten(torch.full((6,), 0.7), no_std_norm=False).abs().gt(1e-3).any()


@pytest.mark.parametrize("name", [name for name in ESTIMATORS if estimator.needs(name, "groups")])
@pytest.mark.parametrize("reward", [0.1, 0.7, 1 / 3])
def test_a_group_that_agrees_learns_exactly_nothing(name, reward):
    zeros = torch.zeros(7, dtype=torch.int64)
    given = CreditInput(torch.full((7,), reward), torch.zeros(21), zeros + 3, zeros)
    assert not run(name, given).advantages.any()


# KL penalty


@pytest.mark.parametrize("name", ["rloo", "dr_grpo", "group_norm"])
def test_kl_penalty_is_charged_from_its_token_backwards_and_never_baselined(name):
    credit = run(name, inputs([1.0, 1.0], [3, 3], kl_penalty=[0.0, 0.25, 0.5, 0.0, 0.0, 0.0]))
    assert credit.advantages.tolist() == [-0.75, -0.75, -0.5, 0, 0, 0]


# Rows without model tokens


@pytest.mark.parametrize("name", ESTIMATORS)
def test_rows_without_model_tokens_change_nothing_for_the_others(name):
    given = random_inputs()
    without = chosen(given, torch.tensor([row for row in range(ROWS) if row != 5]))
    poisoned = replace(given, rewards=given.rewards.index_fill(0, torch.tensor(5), torch.nan))
    for full in (given, poisoned):
        assert_same(run(name, full), run(name, without))


@pytest.mark.parametrize("name", ESTIMATORS)
@pytest.mark.parametrize("rows", [0, 2])
def test_no_tokens_at_all_have_no_credit(name, rows):
    given = inputs([1.0] * rows, [0] * rows, values=[], greedy=[0.5] * rows, turn_rewards=[], episodes=[0] * rows)
    credit = run(name, given)
    assert credit.advantages.shape == credit.returns.shape == (0,)


@pytest.mark.parametrize("own", [1, 2])
@pytest.mark.parametrize("name", ["rloo", "group_norm", "dr_grpo", "reinforce_baseline", "opo", "maxrl", "pkpo"])
def test_a_row_alone_in_its_group_has_nothing_to_compare_with(name, own):
    given = inputs([5.0, 1.0, 3.0], [own, 1, 2], groups=[0, 1, 1])
    assert run(name, given, no_std_norm=True).returns[:own].tolist() == [0] * own


def test_a_row_without_model_tokens_does_not_decide_whether_a_group_agrees():
    """Neither by its distance from the others nor by its size."""
    agree, differ = inputs([0.3, 0.3 + 1e-9, 5.0], [1, 1, 0]), inputs([0.0, 1e-5, 1e6], [1, 1, 0])
    assert run("group_norm", agree).advantages.tolist() == [0, 0]
    assert run("group_norm", differ).advantages.tolist() == pytest.approx([-(0.5**0.5), 0.5**0.5], rel=1e-3)


# Inputs stay as they were


@pytest.mark.parametrize("name", ESTIMATORS)
def test_inputs_are_not_changed_and_group_names_do_not_matter(name):
    given = random_inputs()
    tensors = [*tensors_of(given).values()]
    before = [tensor.clone() for tensor in tensors]
    credit = run(name, given)
    assert_same(run(name, replace(given, groups=1000 - 7 * given.groups)), credit)
    assert all(map(torch.equal, before, tensors))


@pytest.mark.parametrize("name", ESTIMATORS)
def test_the_order_of_rows_does_not_matter(name):
    given = random_inputs()
    order = torch.randperm(ROWS, generator=torch.Generator().manual_seed(3))
    wanted = of_rows(run(name, given).advantages, given.lengths, order)
    torch.testing.assert_close(run(name, chosen(given, order)).advantages, wanted)


@pytest.mark.parametrize(("name", "missing"), [("gae", "values"), ("remax", "greedy")])
def test_an_estimator_without_what_it_reads_is_refused(name, missing):
    with pytest.raises(AssertionError, match=missing):
        run(name, inputs([1.0], [1]))


def test_flash_reinforce_compares_with_the_mean_of_the_whole_rollout():
    """(2 + 4 + 0) / 3 = 2 over the rows that have tokens, whatever their groups."""
    given = inputs([2.0, 4.0, 0.0, 9.0], [2, 1, 2, 0], groups=[0, 0, 1, 1])
    assert run("flash_reinforce", given).advantages.tolist() == [0, 0, 2, -2, -2]


@pytest.mark.notices(
    "OPO's baseline forgets lengths",
    "algo/advantage.py",
    "    lengths = episode_sum(inputs.lengths, inputs)  # [B]",
    "    lengths = torch.ones_like(inputs.lengths)  # [B]",
)
def test_opo_weighs_the_baseline_by_model_tokens():
    """(3 x 1 + 1 x 3) / 4 = 1.5: an empty row is no sample."""
    given = inputs([3.0, 1.0, 7.0], [1, 3, 0])
    assert run("opo", given).advantages.tolist() == [1.5, -0.5, -0.5, -0.5]


def test_opo_with_equal_lengths_is_dr_grpo():
    given = inputs([3.0, 1.0, 7.0], [2, 2, 2], kl_penalty=[0.1, 0.2, 0.3, 0.4, 0.5, 0.6])
    assert_same(run("opo", given), run("dr_grpo", given))


@pytest.mark.notices(
    "ReMax has no baseline", "algo/advantage.py", "whole_rewards(inputs) - inputs.greedy)", "whole_rewards(inputs))"
)
def test_remax_compares_with_the_greedy_response():
    given = inputs([3.0, 1.0], [2, 1], greedy=[2.0, 2.0], kl_penalty=[0.1, 0.2, 0])
    assert run("remax", given).advantages.tolist() == pytest.approx([0.7, 0.8, -1])


# Sums over ragged rows


@pytest.mark.parametrize("dtype", [torch.float32, float64])
@pytest.mark.parametrize("decay", [1.0, 0.97, 0.0])
def test_discounted_sums_are_those_of_a_walk_from_the_last_token_to_the_first(dtype, decay):
    """To the last bit: the numbers of a run do not depend on how its rows are arranged."""
    generator = torch.Generator().manual_seed(1)
    lengths = torch.tensor([3, 0, 40, 1, 3, 0, 17])
    values = torch.randn(64, generator=generator, dtype=dtype)
    wanted = []
    for row in values.split(lengths.tolist()):
        total, backwards = torch.zeros((), dtype=dtype), []
        for value in row.flip(0):
            total = value + decay * total
            backwards.append(total)
        wanted += backwards[::-1]
    assert torch.equal(discounted_sums(values, lengths, decay), torch.stack(wanted))


# Shapes


def test_shapes_that_do_not_fit_are_refused():
    with pytest.raises(AssertionError):
        inputs([1.0, 2.0], [1])
    with pytest.raises(AssertionError, match="lengths"):
        inputs([1.0], [2], kl_penalty=[0.5])
    with pytest.raises(AssertionError, match="lengths"):
        inputs([1.0], [1], kl_penalty=[0.5, 0.5])


def test_an_own_estimator_that_returns_another_shape_is_told_so(tmp_path):
    file = tmp_path / "mine.py"
    file.write_text(
        "from rlhf_suite.algo.advantage import Credit\n"
        "def padded(inputs, config):\n    return Credit(inputs.kl_penalty[None], inputs.kl_penalty[None])\n"
    )
    with pytest.raises(UserError, match=r"mine.py:2: padded returned .* \[1, 3\].* each of the 3 tokens"):
        run(f"{file}:padded", inputs([1.0], [3]))


@pytest.mark.notices(
    "the lower bound of advantages holds above as well",
    "algo/advantage.py",
    "    return advantages.clamp(low, high)",
    "    return advantages.clamp(low, -low)",
)
def test_clipped_advantages_keep_their_signs_and_their_order():
    given = torch.tensor([-7.0, -1.5, -0.25, 0.0, 0.5, 1.25, 9.0], dtype=float64)
    assert clip_advantages(given, [-1.5, 1.0]).tolist() == [-1.5, -1.5, -0.25, 0, 0.5, 1, 1]
    assert clip_advantages(given, [0.0, 1e9]).tolist() == [0, 0, 0, 0, 0.5, 1.25, 9], "good tokens alone"
