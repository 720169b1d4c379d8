"""What comes between a score and the reward of an estimator, and which groups are trained on."""

from __future__ import annotations

import pytest
import torch

from rlhf_suite.algo.scores import clip_scores, normalize_scores, overlong_penalty, standardize, stop_properly, teaches


def test_scores_are_standardised_over_all_of_them_and_those_that_agree_are_0():
    assert standardize([3.0, 1.0, 0.0, 0.0]) == pytest.approx([2 / 2**0.5, 0, -1 / 2**0.5, -1 / 2**0.5])
    assert standardize([0.7, 0.7, 0.7]) == pytest.approx([0, 0, 0], abs=1e-6) and standardize([5.0]) == [0]


@pytest.mark.notices(
    "a standardised score keeps its mean", "algo/scores.py", "(scores - mean) / max(std", "scores / max(std"
)
def test_scores_are_standardised_with_the_constants_of_the_reward_model():
    assert normalize_scores(torch.tensor([1.0, 3.0]), mean=1.0, std=2.0).tolist() == [0, 1]


def test_a_reward_model_without_spread_gives_no_infinities():
    assert normalize_scores(torch.tensor([1.0]), mean=1.0, std=0.0).tolist() == [0]


def test_clipping_bounds_the_raw_score():
    assert clip_scores(torch.tensor([-20.0, 0.5, 20.0]), [-10.0, 5.0]).tolist() == [-10, 0.5, 5]


@pytest.mark.notices(
    "the overlong penalty begins at the longest response",
    "algo/scores.py",
    "(longest - buffer)).clamp",
    "longest).clamp",
)
def test_the_overlong_penalty_grows_linearly_over_the_buffer():
    """Of 20 tokens the last 8 are the buffer: 12 cost nothing, 14 a quarter, 20 all; the second row may have 100."""
    lengths, longest = torch.tensor([5, 12, 14, 20, 20]), torch.tensor([20, 20, 20, 20, 100])
    assert overlong_penalty(lengths, longest, buffer=8, factor=2.0).tolist() == [0, 0, 0.5, 2, 0]


@pytest.mark.notices(
    "responses that ended are penalised instead of those cut off",
    "algo/scores.py",
    "torch.where(truncated, penalised, rewards)",
    "torch.where(truncated, rewards, penalised)",
)
@pytest.mark.parametrize(("coef", "wanted"), [(0.5, [1.0, -1.0]), (0.0, [0.0, -1.0]), (-0.7, [-0.7, -1.0])])
def test_truncated_responses_lose_part_of_their_reward_or_all(coef, wanted):
    assert stop_properly(torch.tensor([2.0, -1.0]), torch.tensor([True, False]), coef).tolist() == pytest.approx(wanted)
    assert stop_properly(torch.tensor([2.0]), torch.tensor([True]), 1.0).tolist() == [2]


@pytest.mark.notices(
    "the filter drops the groups that it should keep",
    "algo/scores.py",
    "    return low < mean < high and",
    "    return not low < mean < high and",
)
@pytest.mark.parametrize(
    ("scores", "kept"),
    [
        ([1.0, 1.0], False),  # all right
        ([0.0, 0.0], False),  # all wrong
        ([0.0, 1.0], True),
        ([0.3, 0.3, 0.3], False),  # inside the range, but nothing to compare
        ([0.29, 0.3, 0.31], True),
        ([-3.0, 3.5], True),
        ([-3.0, 2.0], False),
    ],
)
def test_groups_that_teach_something_are_kept(scores, kept):
    assert teaches(scores, 0.0, 1.0, 0.0) == kept


def test_a_least_deviation_can_be_asked_for():
    assert teaches([0.4, 0.6], 0.0, 1.0, 0.09) and not teaches([0.4, 0.6], 0.0, 1.0, 0.11)
