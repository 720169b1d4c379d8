"""Estimators of other objectives than the mean reward: their formulas, one response at a time in plain floats, and the
gradients that they estimate, exactly, by every way that samples of a small vocabulary can come."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import pytest
import torch

from rlhf_suite.algo.advantage import Credit, CreditInput, Numbers, assign_credit
from rlhf_suite.algo.group_objectives import best_of_k
from rlhf_suite.algo.scores import pass_at_k
from rlhf_suite.config.declarations.algo import AdvantageConfig
from rlhf_suite.errors import UserError

float64 = torch.float64
PARTS = ("answer", "format", "length")
WEIGHTS = [1.0, 0.5, 2.0]


def given(rewards, lengths=None, groups=None, **further) -> CreditInput:
    """Rows of so many tokens, one each where nothing is said."""
    lengths = [1] * len(rewards) if lengths is None else lengths
    return CreditInput(
        rewards=torch.tensor(rewards, dtype=float64),
        kl_penalty=torch.zeros(sum(lengths), dtype=float64),
        lengths=torch.tensor(lengths, dtype=torch.int64),
        groups=torch.tensor([0] * len(rewards) if groups is None else groups, dtype=torch.int64),
        **further,
    )


def run(name: str, inputs: CreditInput, **options) -> Credit:
    return assign_credit(inputs, AdvantageConfig(estimator=name, **options))


def run_gdpo(inputs: CreditInput, numbers: dict[str, list[float]], **options) -> list[float]:
    """The advantages of GDPO with these parts of the rewards."""
    columns = Numbers({name: torch.tensor(values, dtype=float64) for name, values in numbers.items()})
    options = {"reward_parts": list(numbers), **options}
    return run("gdpo", replace(inputs, numbers=columns), **options).advantages.tolist()


# GDPO


def standardised(values: list[float]) -> list[float]:
    """(x - mean) / (deviation + 1e-9), the deviation unbiased."""
    mean = math.fsum(values) / len(values)
    variance = math.fsum((value - mean) ** 2 for value in values) / (len(values) - 1)
    return [(value - mean) / (math.sqrt(variance) + 1e-9) for value in values]


def gdpo_by_the_paper(groups: list[list[tuple[float, ...]]], weights: list[float]) -> list[float]:
    """The advantages of all samples, group after group; each sample is the tuple of its rewards."""
    sums = []
    for samples in groups:
        columns = [standardised(list(column)) for column in zip(*samples, strict=True)]
        sums += [math.fsum(w * a for w, a in zip(weights, row, strict=True)) for row in zip(*columns, strict=True)]
    return standardised(sums)


@pytest.mark.notices(
    "GDPO standardises the sum of the rewards alone",
    "algo/group_objectives.py",
    "weight * standardize_by_name(inputs.numbers[name], inputs.groups, counted)",
    "weight * inputs.numbers[name].double()",
)
@pytest.mark.notices(
    "GDPO does not standardise over the rollout",
    "algo/group_objectives.py",
    "    rewards = standardize_by_name(total, roles_of(inputs), counted)",
    "    rewards = total",
)
@pytest.mark.notices(
    "GDPO's deviation is the biased one",
    "algo/group_objectives.py",
    "(sum_by(names, counted) - 1).clamp(min=1)",
    "sum_by(names, counted).clamp(min=1)",
)
@pytest.mark.parametrize("weights", [None, WEIGHTS])
def test_gdpo_is_the_formula_of_the_paper(weights):
    generator = torch.Generator().manual_seed(2)
    samples = (10 * torch.randn(4, 5, 3, generator=generator, dtype=float64)).tolist()  # groups, samples, parts
    rows = [tuple(sample) for group in samples for sample in group]
    columns = dict(zip(PARTS, map(list, zip(*rows, strict=True)), strict=True))
    groups = [number for number in range(4) for _ in range(5)]
    found = run_gdpo(given([0.0] * 20, groups=groups), columns, reward_part_weights=weights)
    wanted = gdpo_by_the_paper([[tuple(sample) for sample in group] for group in samples], weights or [1.0] * 3)
    assert found == pytest.approx(wanted, rel=1e-12, abs=1e-14)


def test_answers_that_earn_the_same_by_other_parts_differ_where_the_parts_differ():
    """One reward of 1 of three: by the first part two samples had it, by the second one alone, which is worth more."""
    numbers = {"answer": [1.0, 1.0, 0.0, 0.0], "format": [0.0, 0.0, 1.0, 0.0]}
    found = run_gdpo(given([1.0, 1.0, 1.0, 0.0]), numbers)
    assert found[0] == found[1] < found[2] and found[3] < 0
    assert run("group_norm", given([1.0, 1.0, 1.0, 0.0])).advantages[:3].unique().numel() == 1


def test_gdpo_with_one_part_is_grpo_standardised_over_the_rollout():
    rewards, groups = [1.0, 0.0, 0.0, 5.0, 1.0, 3.0], [0, 0, 0, 1, 1, 1]
    grpo = run("group_norm", given(rewards, groups=groups)).advantages.tolist()
    found = run_gdpo(given([0.0] * 6, groups=groups), {"answer": rewards})
    assert found == pytest.approx(standardised(grpo))


def test_a_part_that_agrees_adds_nothing_and_all_that_agree_teach_nothing():
    varied, same = [1.0, 0.0, 0.0], [0.3, 0.1 + 0.2, 0.3]
    alone = run_gdpo(given([0.0] * 3), {"answer": varied})
    assert run_gdpo(given([0.0] * 3), {"answer": varied, "format": same}) == alone
    assert run_gdpo(given([0.0] * 3), {"answer": same, "format": same}) == [0, 0, 0]


@pytest.mark.notices(
    "a part that a sample lacks is a reward of 0",
    "algo/group_objectives.py",
    "counted & is_known",
    "counted",
)
def test_a_part_that_a_sample_does_not_have_is_in_no_mean():
    """The third sample has no format: its advantage is that of its answer, and the others compare two formats."""
    numbers = {"answer": [1.0, 0.0, 0.0], "format": [4.0, 2.0, math.nan]}
    answers, formats = standardised([1.0, 0.0, 0.0]), standardised([4.0, 2.0])
    wanted = standardised([answers[0] + formats[0], answers[1] + formats[1], answers[2]])
    assert run_gdpo(given([0.0] * 3), numbers) == pytest.approx(wanted)


@pytest.mark.parametrize("name", ["gdpo", "maxrl", "pkpo"])
def test_an_episode_counts_once_and_a_row_without_tokens_never(name):
    """Four samples; the first has three rows, one of them empty, and beside them is an empty one of unknown worth."""
    rewards = [1.0, 1.0, 0.0, 1.0, 0.0, 1.0, math.nan]
    lengths, episodes = [0, 2, 1, 1, 3, 1, 0], [0, 0, 1, 0, 2, 3, 4]
    inputs = given(rewards, lengths, episodes=torch.tensor(episodes))
    numbers = {"answer": rewards, "format": [3.0, 3.0, 1.0, 3.0, 2.0, 2.0, math.nan]}
    alone = {key: [values[row] for row in (1, 2, 4, 5)] for key, values in numbers.items()}
    if name == "gdpo":
        found, (first, second, third, fourth) = run_gdpo(inputs, numbers), run_gdpo(given([0.0] * 4), alone)
    else:
        found = run(name, inputs, pass_k=2).advantages.tolist()
        first, second, third, fourth = run(name, given(alone["answer"]), pass_k=2).advantages.tolist()
    assert found == pytest.approx([first, first, second, first, third, third, third, fourth])


def test_gdpo_reads_the_parts_and_not_the_reward_as_a_whole():
    numbers = {"answer": [1.0, 0.0, 0.5]}
    assert run_gdpo(given([0.0] * 3), numbers) == run_gdpo(given([7.0, -1.0, 100.0]), numbers)


# What maxrl and pkpo estimate: E of the mean over the group of R' grad log p, over all ways to sample it


LOGITS = torch.tensor([0.3, -0.8, 0.1, 0.9], dtype=float64)
SUCCESSES = torch.tensor([1.0, 0.0, 0.0, 1.0], dtype=float64)
WORTHS = torch.tensor([0.2, 0.9, -0.4, 0.2], dtype=float64)


def expected_gradient(name: str, worths: torch.Tensor, samples: int, **options) -> torch.Tensor:
    """The expectation of the estimated gradient with respect to the logits, [4]; each sample is one token."""
    probabilities = LOGITS.softmax(0)
    scores = torch.eye(4, dtype=float64) - probabilities  # [token, logit]: the gradient of its log-prob
    total = torch.zeros(4, dtype=float64)
    for drawn in itertools.product(range(4), repeat=samples):
        index = torch.tensor(drawn)
        advantages = run(name, given(worths[index].tolist()), **options).advantages
        total += probabilities[index].prod() * (advantages[:, None] * scores[index]).mean(0)
    return total


def gradient_of(objective, worths: torch.Tensor) -> torch.Tensor:
    """The gradient of an objective of all outcomes' probabilities."""
    logits = LOGITS.clone().requires_grad_()
    (found,) = torch.autograd.grad(objective(logits.softmax(0), worths), logits)
    return found


@pytest.mark.notices(
    "MaxRL divides by the deviation's place holder",
    "algo/group_objectives.py",
    "subtract_group_means(inputs) / mean, 0)",
    "subtract_group_means(inputs) / mean.sqrt(), 0)",
)
@pytest.mark.notices(
    "MaxRL has no baseline",
    "algo/group_objectives.py",
    "subtract_group_means(inputs) / mean, 0)",
    "rewards / mean, 0)",
)
@pytest.mark.parametrize("samples", [2, 3, 4])
def test_maxrl_estimates_the_log_likelihood_of_a_success_to_the_order_of_one_sample_less(samples):
    """log p = -sum_{k>=1} (1 - p)^k / k."""

    def objective(probabilities, worths):
        failure = 1 - (probabilities * worths).sum()
        return -sum(failure**k / k for k in range(1, samples))

    torch.testing.assert_close(
        expected_gradient("maxrl", SUCCESSES, samples), gradient_of(objective, SUCCESSES), rtol=1e-12, atol=1e-14
    )


def test_maxrl_by_hand():
    """One success of four: (1 - 1/4) / (1/4) = 3, the others -1; a group without one, and one of successes alone: 0."""
    inputs = given([1.0, 0.0, 0.0, 0.0, 0.0, 0.0, 1.0, 1.0], groups=[0] * 4 + [1, 1, 2, 2])
    assert run("maxrl", inputs).advantages.tolist() == [3, -1, -1, -1, 0, 0, 0, 0]


@pytest.mark.notices(
    "rewards below 0 pass for successes",
    "algo/group_objectives.py",
    "(rewards[count_above(inputs)] < 0).any()",
    "(rewards[count_above(inputs)] < -1e9).any()",
)
def test_maxrl_refuses_rewards_below_0():
    with pytest.raises(UserError, match=r"a reward is -0\.5, and maxrl divides .*estimator=dr_grpo"):
        run("maxrl", given([1.0, -0.5, 0.0]))
    run("maxrl", given([1.0, -0.5, 0.0], [1, 0, 1]))  # of a row without tokens nothing is read


def largest_of(k: int):
    """The expectation of the largest worth of k samples, over all ways to draw them."""

    def objective(probabilities, worths):
        return sum(
            probabilities[torch.tensor(drawn)].prod() * max(float(worths[token]) for token in drawn)
            for drawn in itertools.product(range(4), repeat=k)
        )

    return objective


@pytest.mark.notices(
    "PKPO optimises another k", "algo/group_objectives.py", ".numpy(), config.pass_k)", ".numpy(), config.pass_k - 1)"
)
@pytest.mark.notices(
    "PKPO counts sets of k others",
    "algo/group_objectives.py",
    "math.comb(rank, k - 1) / sets",
    "math.comb(rank, k) / sets",
)
@pytest.mark.notices(
    "the estimate of PKPO is not scaled to a mean over the group",
    "algo/group_objectives.py",
    "grown[-1] + k * (above - below)",
    "grown[-1] + (above - below)",
)
@pytest.mark.parametrize(("samples", "k"), [(2, 2), (3, 2), (4, 2), (4, 3), (4, 4)])
@pytest.mark.parametrize("worths", [SUCCESSES, WORTHS], ids=["successes", "rewards"])
def test_pkpo_estimates_the_gradient_of_the_largest_reward_of_k_samples(samples, k, worths):
    found = expected_gradient("pkpo", worths, samples, pass_k=k)
    torch.testing.assert_close(found, gradient_of(largest_of(k), worths), rtol=1e-12, atol=1e-14)


def test_the_largest_reward_of_k_samples_is_pass_at_k_for_successes():
    """Averaged over all sets of k of 5 samples, of which 2 are right."""
    right = [1.0, 0.0, 1.0, 0.0, 0.0]
    for k in (1, 2, 3, 4, 5):
        sets = [max(chosen) for chosen in itertools.combinations(right, k)]
        assert math.fsum(sets) / len(sets) == pytest.approx(pass_at_k(5, 2, k))


@pytest.mark.parametrize("k", [2, 3, 5, 6])
def test_pkpo_is_the_sum_over_all_sets_of_others(k):
    """Equation 33 of the paper, by every set that holds the sample; ties count too."""
    rewards = [0.3, -1.0, 2.5, 0.3, 0.0, 2.5]
    sets = list(itertools.combinations(range(len(rewards)), k))
    wanted = []
    for own in range(len(rewards)):
        others = [[rewards[row] for row in chosen if row != own] for chosen in sets if own in chosen]
        gains = [max(rewards[own], *rest) - max(rest) for rest in others]
        wanted.append(len(rewards) * math.fsum(gains) / len(sets))
    found = run("pkpo", given(rewards), pass_k=k).advantages.tolist()
    assert found == pytest.approx(wanted)


def test_pkpo_of_equal_rewards_and_of_fewer_than_k_samples_is_exactly_0():
    assert not best_of_k(torch.full((6,), 0.1, dtype=float64).numpy(), 3).any()
    inputs = given([1.0, 0.0, 1.0, 0.0, 0.5], groups=[0, 0, 1, 1, 1])
    assert run("pkpo", inputs, pass_k=3).advantages.tolist() == [0, 0, pytest.approx(1.5), 0, 0]
