"""Every estimator by hand, by identity, across gaps and with empty rows."""

from __future__ import annotations

from dataclasses import fields, replace

import pytest
import torch

from rlhf_suite.algo.advantage import Credit, CreditInput, assign_credit, whiten
from rlhf_suite.config.algo import AdvantageConfig
from rlhf_suite.registry import estimator

WHITENED = ("gae", "reinforce", "reinforce_baseline")


def inputs(rewards, mask, groups=None, kl=None, values=None, greedy=None) -> CreditInput:
    mask = torch.tensor(mask, dtype=torch.float64)
    return CreditInput(
        rewards=torch.tensor(rewards, dtype=torch.float64),
        kl_penalty=torch.zeros_like(mask) if kl is None else torch.tensor(kl, dtype=torch.float64),
        mask=mask,
        groups=torch.zeros(len(mask), dtype=torch.int64) if groups is None else torch.tensor(groups),
        values=None if values is None else torch.tensor(values, dtype=torch.float64),
        greedy=None if greedy is None else torch.tensor(greedy, dtype=torch.float64),
    )


def random_inputs(seed: int = 0, rows: int = 12, steps: int = 9) -> CreditInput:
    """Three groups of four rows, with gaps; row 5 is empty."""
    generator = torch.Generator().manual_seed(seed)
    mask = (torch.rand(rows, steps, generator=generator) < 0.7).double()
    mask[:, 0] = 1
    mask[5] = 0
    return CreditInput(
        rewards=torch.randn(rows, generator=generator, dtype=torch.float64),
        kl_penalty=0.1 * torch.randn(rows, steps, generator=generator, dtype=torch.float64),
        mask=mask,
        groups=torch.arange(rows) % 3,
        values=torch.randn(rows, steps, generator=generator, dtype=torch.float64),
        greedy=torch.randn(3, generator=generator, dtype=torch.float64)[torch.arange(rows) % 3],
    )


def chosen(given: CreditInput, rows: torch.Tensor) -> CreditInput:
    """Some of the rows, or all in another order."""
    return CreditInput(*(getattr(given, field.name)[rows] for field in fields(CreditInput)))


def run(name: str, given: CreditInput, **options) -> Credit:
    return assign_credit(given, AdvantageConfig(estimator=name, **options))


def first_tokens(credit: Credit) -> list[float]:
    return credit.advantages[:, 0].tolist()


def assert_same(one: Credit, other: Credit) -> None:
    torch.testing.assert_close(one.advantages, other.advantages)
    torch.testing.assert_close(one.returns, other.returns)


# By hand


def test_gae_by_hand():
    given = inputs([1.0], [[1, 1, 1]], values=[[0.5, 0.25, 0.75]])
    credit = run("gae", given, gamma=0.9, lambd=0.5, no_std_norm=True)
    third = 1.0 - 0.75
    second = 0.9 * 0.75 - 0.25 + 0.45 * third
    first = 0.9 * 0.25 - 0.5 + 0.45 * second
    raw = torch.tensor([[first, second, third]], dtype=torch.float64)
    torch.testing.assert_close(credit.advantages, raw - raw.mean())
    torch.testing.assert_close(credit.returns, raw + given.values)


def test_reinforce_by_hand():
    credit = run("reinforce", inputs([2.0], [[1, 1, 1]], kl=[[0.5, 0.0, 0.25]]), gamma=0.5, no_std_norm=True)
    returns = torch.tensor([[-0.5 + 0.5 * 0.875, 0.5 * 1.75, 1.75]], dtype=torch.float64)
    torch.testing.assert_close(credit.returns, returns)
    torch.testing.assert_close(credit.advantages, returns - returns.mean())


def test_reinforce_baseline_by_hand():
    credit = run("reinforce_baseline", inputs([1.0, 0.0, 0.5], [[1], [1], [1]], groups=[7, 7, 9]), no_std_norm=True)
    assert first_tokens(credit) == [0.5, -0.5, 0.0] and credit.returns[:, 0].tolist() == [0.5, -0.5, 0.0]


def test_rloo_by_hand():
    credit = run("rloo", inputs([1.0, 0.0, 0.0, 4.0, 2.0], [[1, 1]] * 5, groups=[3, 3, 3, 1, 1]))
    assert first_tokens(credit) == pytest.approx([1.0, -0.5, -0.5, 2.0, -2.0])
    assert torch.equal(credit.advantages[:, 0], credit.advantages[:, 1])


def test_group_norm_by_hand():
    credit = run("group_norm", inputs([1.0, 0.0, 0.0, 1.0, 5.0, 5.0], [[1]] * 6, groups=[0, 0, 0, 0, 1, 1]))
    deviation = (4 * 0.25 / 3) ** 0.5
    assert first_tokens(credit) == pytest.approx(
        [0.5 / deviation, -0.5 / deviation, -0.5 / deviation, 0.5 / deviation, 0, 0]
    )


def test_dr_grpo_by_hand():
    credit = run("dr_grpo", inputs([1.0, 0.0, 0.0, 0.0, 8.0, 6.0], [[1]] * 6, groups=[0, 0, 0, 0, 1, 1]))
    assert first_tokens(credit) == [0.75, -0.25, -0.25, -0.25, 1.0, -1.0]


# Identities


@pytest.mark.parametrize("gamma", [1.0, 0.8])
def test_gae_with_lambda_one_is_reward_to_go_less_value(gamma):
    given = random_inputs()
    gae = run("gae", given, gamma=gamma, lambd=1.0)
    reinforce = run("reinforce", given, gamma=gamma)
    torch.testing.assert_close(gae.returns, reinforce.returns)
    assert_same(run("gae", replace(given, values=torch.zeros_like(given.mask)), gamma=gamma), reinforce)


def test_gae_with_lambda_zero_is_the_temporal_difference():
    given = inputs([1.0], [[1, 1]], values=[[0.5, 0.25]])
    credit = run("gae", given, gamma=0.9, lambd=0.0)
    torch.testing.assert_close(credit.returns, torch.tensor([[0.9 * 0.25, 1.0]], dtype=torch.float64))


def test_rloo_is_the_group_mean_baseline_times_n_over_n_minus_one():
    given = random_inputs()
    given = replace(given, kl_penalty=torch.zeros_like(given.mask))
    sizes = torch.tensor([4, 4, 3] * 4)[:, None]  # the empty row 5 is in group 2
    expected = run("dr_grpo", given).advantages * sizes / (sizes - 1)
    torch.testing.assert_close(run("rloo", given).advantages, expected)


@pytest.mark.parametrize("name", ["rloo", "dr_grpo", "group_norm"])
def test_group_advantages_sum_to_zero_in_each_group(name):
    given = random_inputs()
    advantages = run(name, replace(given, kl_penalty=torch.zeros_like(given.mask))).advantages[:, 0]
    for group in range(3):
        assert advantages[given.groups == group].sum().item() == pytest.approx(0, abs=1e-7)


def test_group_norm_has_unit_deviation_in_each_group():
    given = random_inputs()
    advantages = run("group_norm", replace(given, kl_penalty=torch.zeros_like(given.mask))).advantages[:, 0]
    assert advantages[given.groups == 1].std().item() == pytest.approx(1)


@pytest.mark.parametrize("name", WHITENED)
def test_whitened_advantages_have_mean_zero_and_variance_one_over_model_tokens(name):
    given = random_inputs()
    chosen = run(name, given).advantages[given.mask.bool()]
    assert chosen.mean().item() == pytest.approx(0, abs=1e-12)
    assert chosen.var(correction=0).item() == pytest.approx(1)


@pytest.mark.parametrize("name", WHITENED)
def test_without_std_norm_only_the_mean_goes(name):
    given = random_inputs()
    plain, normed = (run(name, given, no_std_norm=flag).advantages for flag in (True, False))
    deviation = plain[given.mask.bool()].std(correction=0)
    torch.testing.assert_close(plain, normed * deviation)
    assert plain[given.mask.bool()].mean().item() == pytest.approx(0, abs=1e-12)


@pytest.mark.parametrize("name", estimator.names())
def test_only_whitening_estimators_mix_groups(name):
    given = random_inputs()
    other = replace(given, rewards=torch.where(given.groups == 0, 3 * given.rewards + 1, given.rewards))
    untouched = given.groups != 0
    same = torch.equal(run(name, given).advantages[untouched], run(name, other).advantages[untouched])
    assert same == (name not in (*WHITENED, "flash_reinforce"))


def test_whitening_constant_advantages_gives_zeros():
    assert not whiten(torch.full((2, 3), 0.7), torch.ones(2, 3), no_std_norm=False).abs().gt(1e-3).any()


@pytest.mark.parametrize("name", estimator.that_need("groups"))
@pytest.mark.parametrize("reward", [0.1, 0.7, 1 / 3])
def test_a_group_that_agrees_learns_exactly_nothing(name, reward):
    given = CreditInput(
        torch.full((7,), reward), torch.zeros(7, 3), torch.ones(7, 3), torch.zeros(7, dtype=torch.int64)
    )
    assert not run(name, given).advantages.any()


# KL penalty


@pytest.mark.parametrize("name", ["rloo", "dr_grpo", "group_norm"])
def test_kl_penalty_is_charged_from_its_token_backwards_and_never_baselined(name):
    kl = [[0.0, 0.25, 0.5], [0.0, 0.0, 0.0]]
    credit = run(name, inputs([1.0, 1.0], [[1, 1, 1], [1, 1, 1]], kl=kl))
    assert credit.advantages.tolist() == [[-0.75, -0.75, -0.5], [0, 0, 0]]


# Gaps


@pytest.mark.parametrize("name", estimator.names())
def test_gaps_make_no_difference(name):
    """Tokens of an environment between, before and behind model tokens: same credit as without them."""
    dense = random_inputs()
    dense = replace(dense, mask=torch.ones_like(dense.mask))
    rows = len(dense.mask)
    places = torch.tensor([1, 2, 3, 6, 7, 11, 12, 13, 17])  # of 9 model tokens among 20 positions

    def spread(values):
        out = torch.full((rows, 20), 1e3, dtype=torch.float64)  # whatever stands in a gap must not matter
        out[:, places] = values
        return out

    mask = torch.zeros(rows, 20, dtype=torch.float64)
    mask[:, places] = 1
    sparse = replace(dense, kl_penalty=spread(dense.kl_penalty), values=spread(dense.values), mask=mask)
    one, other = (run(name, given, gamma=0.8, lambd=0.9) for given in (dense, sparse))
    torch.testing.assert_close(other.advantages[:, places], one.advantages)
    torch.testing.assert_close(other.returns[:, places], one.returns)
    assert not other.advantages[~mask.bool()].any() and not other.returns[~mask.bool()].any()


def test_the_reward_lands_on_the_last_model_token_of_the_row_not_of_a_turn():
    credit = run("reinforce", inputs([1.0], [[1, 1, 0, 1, 0]]), gamma=0.5)
    assert credit.returns.tolist() == [[0.25, 0.5, 0.0, 1.0, 0.0]]


# Rows without model tokens


@pytest.mark.parametrize("name", estimator.names())
def test_rows_without_model_tokens_change_nothing_for_the_others(name):
    given = random_inputs()
    kept = torch.tensor([row for row in range(12) if row != 5])
    without = chosen(given, kept)
    poisoned = replace(given, rewards=given.rewards.index_fill(0, torch.tensor(5), torch.nan))
    for full in (given, poisoned):
        credit = run(name, full)
        torch.testing.assert_close(credit.advantages[kept], run(name, without).advantages)
        assert not credit.advantages[5].any() and not credit.returns[5].any()


@pytest.mark.parametrize("name", estimator.names())
def test_nothing_but_empty_rows_gives_zeros(name):
    given = inputs([1.0, 2.0], [[0, 0], [0, 0]], values=[[1, 1], [1, 1]], greedy=[0.5, 0.5])
    credit = run(name, given)
    assert not credit.advantages.any() and not credit.returns.any()


@pytest.mark.parametrize("name", ["rloo", "group_norm", "dr_grpo", "reinforce_baseline"])
def test_a_row_alone_in_its_group_has_nothing_to_compare_with(name):
    given = inputs([5.0, 1.0, 3.0], [[1, 1], [1, 0], [1, 1]], groups=[0, 1, 1])
    assert run(name, given, no_std_norm=True).returns[0].tolist() == [0, 0]


# Inputs stay as they were


@pytest.mark.parametrize("name", estimator.names())
def test_inputs_are_not_changed_and_group_names_do_not_matter(name):
    given = random_inputs()
    before = [tensor.clone() for tensor in (given.rewards, given.kl_penalty, given.mask, given.values)]
    credit = run(name, given)
    assert_same(run(name, replace(given, groups=1000 - 7 * given.groups)), credit)
    assert all(map(torch.equal, before, (given.rewards, given.kl_penalty, given.mask, given.values)))


@pytest.mark.parametrize("name", estimator.names())
def test_the_order_of_rows_does_not_matter(name):
    given = random_inputs()
    order = torch.randperm(12, generator=torch.Generator().manual_seed(3))
    torch.testing.assert_close(run(name, chosen(given, order)).advantages, run(name, given).advantages[order])


@pytest.mark.parametrize(("name", "missing"), [("gae", "values"), ("remax", "greedy")])
def test_an_estimator_without_what_it_reads_is_refused(name, missing):
    with pytest.raises(AssertionError, match=missing):
        run(name, inputs([1.0], [[1]]))


def test_flash_reinforce_compares_with_the_mean_of_the_whole_rollout():
    """(2 + 4 + 0) / 3 = 2 over the rows that have tokens, whatever their groups."""
    given = inputs([2.0, 4.0, 0.0, 9.0], [[1, 1], [1, 0], [1, 1], [0, 0]], groups=[0, 0, 1, 1])
    assert run("flash_reinforce", given).advantages.tolist() == [[0, 0], [2, 0], [-2, -2], [0, 0]]


def test_opo_weighs_the_baseline_by_model_tokens():
    """(3 x 1 + 1 x 3) / 4 = 1.5: a gap is no token, and an empty row no sample."""
    given = inputs([3.0, 1.0, 7.0], [[0, 1, 0, 0], [1, 0, 1, 1], [0, 0, 0, 0]])
    assert run("opo", given).advantages.tolist() == [[0, 1.5, 0, 0], [-0.5, 0, -0.5, -0.5], [0, 0, 0, 0]]


def test_opo_with_equal_lengths_is_dr_grpo():
    given = replace(random_inputs(), mask=torch.ones(12, 9, dtype=torch.float64))
    assert_same(run("opo", given), run("dr_grpo", given))


def test_remax_compares_with_the_greedy_response():
    given = inputs([3.0, 1.0], [[1, 1], [1, 0]], greedy=[2.0, 2.0], kl=[[0.1, 0.2], [0, 0]])
    assert run("remax", given).advantages[0].tolist() == pytest.approx([0.7, 0.8])
    assert run("remax", given).advantages[1].tolist() == [-1, 0]


def test_shapes_that_do_not_fit_are_refused():
    with pytest.raises(AssertionError):
        inputs([1.0, 2.0], [[1]])
