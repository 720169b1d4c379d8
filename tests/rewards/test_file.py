"""What a user's reward_func may return, and what is said when it returns something else."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from rlhf_suite.rewards.base import Choice, RewardFailure, Scored
from rlhf_suite.rewards.reply import outcomes


@pytest.mark.notices(
    "without scores of its own a file's scores are 0",
    "rewards/reply.py",
    'number("score", score[0]) if score else None',
    'number("score", score[0]) if score else 0.0',
)
@pytest.mark.parametrize(
    "result",
    [
        [1, 0.5],
        (1.0, 0.5),
        torch.tensor([1.0, 0.5]),
        np.array([1.0, 0.5], dtype=np.float32),
        [torch.tensor(1.0), np.float32(0.5)],
        {"rewards": [1, 0.5]},
        {"rewards": [True, 0.5], "scores": None, "extra_logs": None},
    ],
)
def test_rewards_come_in_many_containers(result):
    assert outcomes(result, 2) == [Scored(1.0, 1.0), Scored(0.5, 0.5)]


def test_scores_and_extra_logs_belong_to_their_rows_and_entries_may_be_absent():
    result = {
        "rewards": [-1, 2],
        "scores": [0, 1],
        "extra_logs": {"format": torch.tensor([0.5, 1.0]), "steps": [None, 3]},
    }
    assert outcomes(result, 2) == [
        Scored(-1, 0, {"format": 0.5}),
        Scored(2, 1, {"format": 1.0, "steps": 3.0}),
    ]


@pytest.mark.notices(
    "a reward that is not finite is 0", "rewards/reply.py", 'raise ResultError(f"{name} is {result}")', "return 0.0"
)
@pytest.mark.parametrize("bad", [math.nan, math.inf, "1.0", None, [1.0], 1j])
def test_a_bad_entry_fails_its_own_row_with_the_value_named(bad):
    first, second = outcomes([bad, 1.0], 2)
    assert isinstance(first, RewardFailure) and first.kind == "error" and first.reason.startswith("reward is ")
    assert second == Scored(1.0, 1.0)


def test_a_bad_score_or_log_fails_its_row_too():
    result = {"rewards": [1, 1, 1], "scores": [math.nan, 1, 1], "extra_logs": {"x": [0, math.inf, 0]}}
    first, second, third = outcomes(result, 3)
    assert first == RewardFailure("score is nan", "error")
    assert second == RewardFailure("extra_logs['x'] is inf", "error")
    assert third == Scored(1, 1, {"x": 0})


@pytest.mark.notices(
    "fewer answers than responses are taken for the first ones",
    "rewards/reply.py",
    "if len(values) != count:",
    "if len(values) > count:",
)
@pytest.mark.parametrize(
    ("result", "reason"),
    [
        ([1.0], "1 rewards for 2 responses"),
        ({"rewards": [1, 2], "scores": [1, 2, 3]}, "3 scores for 2 responses"),
        ({"rewards": [1, 2], "extra_logs": {"x": [1]}}, r"1 extra_logs\['x'\] for 2 responses"),
        ({"reward": [1, 2]}, r"without 'rewards'; its keys are \['reward'\]"),
        (1.0, "rewards as float; expected a list of 2 numbers"),
        (torch.tensor(1.0), "rewards as float"),
        (None, "rewards as NoneType"),
    ],
)
def test_a_result_that_does_not_fit_the_batch_fails_every_row(result, reason):
    failures = outcomes(result, 2)
    assert len(failures) == 2
    for failure in failures:
        assert isinstance(failure, RewardFailure) and failure.kind == "error"
        with pytest.raises(AssertionError, match=reason):
            raise AssertionError(failure.reason)


def test_a_single_number_in_extra_logs_is_that_of_every_row():
    """As the example in OpenRLHF's README returns it."""
    for value in (0.25, torch.tensor(0.25), np.float32(0.25)):
        result = {"rewards": torch.tensor([1.0, 2.0]), "scores": [1, 1], "extra_logs": {"dummy": value}}
        assert outcomes(result, 2) == [Scored(1, 1, {"dummy": 0.25}), Scored(2, 1, {"dummy": 0.25})]


PARTS = {"answer": [1, 0], "format": [-0.5, 0.25]}


@pytest.mark.parametrize(
    "result",
    [
        {"rewards": PARTS},
        {"rewards": {"answer": torch.tensor([1, 0]), "format": np.array([-0.5, 0.25])}},
        {"rewards": [{"answer": 1, "format": -0.5}, {"answer": False, "format": 0.25, "other": None}]},
        [{"answer": 1, "format": -0.5}, {"answer": 0, "format": 0.25}],
    ],
)
def test_a_reward_of_named_parts_is_their_sum_and_each_is_logged(result):
    assert outcomes(result, 2) == [
        Scored(0.5, 0.5, {"answer": 1, "format": -0.5}),
        Scored(0.25, 0.25, {"answer": 0, "format": 0.25}),
    ]


def test_the_largest_part_or_a_named_number_may_be_what_is_trained_on():
    result = {"rewards": PARTS, "extra_logs": {"steps": [3, 4]}}

    def rewards(**choice) -> list[float]:
        return [each.reward for each in outcomes(result, 2, choice=Choice(**choice))]

    assert rewards(combine="max") == [1, 0.25]
    assert rewards(key="format") == [-0.5, 0.25]
    assert rewards(key="steps", combine="max") == [3, 4]


def test_scores_beside_parts_are_evaluated_as_they_are():
    first, _ = outcomes({"rewards": PARTS, "scores": [0.75, 0]}, 2, choice=Choice("format"))
    assert (first.reward, first.score) == (-0.5, 0.75)


def test_a_row_without_the_named_part_fails_and_says_which_names_there_are():
    first, second = outcomes([{"answer": 1, "format": 0}, {"format": 1}], 2, choice=Choice("answer"))
    assert first == Scored(1, 1, {"answer": 1, "format": 0})
    assert second.reason == "reward.reward_key=answer, and the named numbers of this reward are: format"
    (plain,) = outcomes([1.0], 1, choice=Choice("answer"))
    assert plain.reason.endswith("numbers of this reward are: none")


@pytest.mark.parametrize(
    ("rewards", "reason"),
    [
        ({}, "rewards without a part"),
        ({"answer": [1]}, "1 rewards['answer'] for 2 responses"),
        ({"answer": [1, "x"]}, "rewards['answer'] is 'x', not a number"),
        ([1, {}], "reward has no named part"),
        ([1, {"a\n": 1}], "expected a name of 1 to 100 visible characters"),
        ([1, {str(n): 1 for n in range(257)}], "257 names in rewards; 256 are allowed"),
    ],
)
def test_parts_that_make_no_sense_fail_their_rows(rewards, reason):
    *_, last = outcomes({"rewards": rewards}, 2)
    assert isinstance(last, RewardFailure) and reason in last.reason


def test_an_integer_that_no_float_holds_fails_its_row_alone():
    first, second = outcomes([10**400, 1], 2)
    assert first == RewardFailure("reward is too large for a floating-point number", "error")
    assert second == Scored(1, 1)


@pytest.mark.parametrize("rewards", [{"a": [1e308, 1], "b": [1e308, 1]}, [{"a": 1e308, "b": 1e308}, {"a": 1, "b": 1}]])
def test_parts_whose_sum_no_float_holds_fail_their_row_alone(rewards):
    first, second = outcomes({"rewards": rewards}, 2)
    assert isinstance(first, RewardFailure) and "the sum of the parts of this reward is too large" in first.reason
    assert second == Scored(2, 2, {"a": 1, "b": 1})


@pytest.mark.parametrize("name", ["", "x" * 101, "a\x1b[31m", "\ud800", 7])
def test_a_name_that_cannot_be_a_metric_is_refused(name):
    first, _ = outcomes({"rewards": [1, 2], "extra_logs": {name: [1, 1]}}, 2)
    assert isinstance(first, RewardFailure) and "expected a name of 1 to 100 visible characters" in first.reason
    assert first.reason.isprintable()
