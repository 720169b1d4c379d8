"""What a user's reward_func may return, and what is said when it returns something else."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from rlhf_suite.rewards.base import RewardFailure, Scored
from rlhf_suite.rewards.reply import outcomes


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


def test_an_integer_that_no_float_holds_fails_its_row_alone():
    first, second = outcomes([10**400, 1], 2)
    assert first == RewardFailure("reward is too large for a floating-point number", "error")
    assert second == Scored(1, 1)


@pytest.mark.parametrize("name", ["", "x" * 101, "a\x1b[31m", "\ud800", 7])
def test_a_name_that_cannot_be_a_metric_is_refused(name):
    first, _ = outcomes({"rewards": [1, 2], "extra_logs": {name: [1, 1]}}, 2)
    assert isinstance(first, RewardFailure) and "expected a name of 1 to 100 visible characters" in first.reason
    assert first.reason.isprintable()
