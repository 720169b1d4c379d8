"""A solution's score from those of its steps."""

from __future__ import annotations

import pytest

from rlhf_suite.algo.scores import aggregate
from rlhf_suite.registry import step_aggregate

SCORES = [0.5, 0.8, 0.25, 0.9]


@pytest.mark.parametrize(("name", "wanted"), [("min", 0.25), ("product", 0.09), ("last", 0.9), ("mean", 0.6125)])
def test_aggregates_by_hand(name, wanted):
    assert aggregate(SCORES, name) == pytest.approx(wanted)


@pytest.mark.parametrize("name", step_aggregate.names())
def test_one_step_is_the_solution_and_no_step_is_worth_nothing(name):
    assert aggregate([0.7], name) == pytest.approx(0.7)
    assert aggregate([1.0] * 5, name) == 1
    assert aggregate([], name) == 0


def test_they_are_ordered():
    """A product of probabilities is at most the least of them, that at most the mean."""
    assert aggregate(SCORES, "product") <= aggregate(SCORES, "min") <= aggregate(SCORES, "mean")


@pytest.mark.parametrize("name", ["min", "product", "mean"])
def test_the_order_of_steps_matters_to_the_last_alone(name):
    assert aggregate(SCORES[::-1], name) == pytest.approx(aggregate(SCORES, name))
    assert aggregate(SCORES[::-1], "last") == SCORES[0]
