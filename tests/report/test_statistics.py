"""Mean, interquartile mean and bootstrap intervals against numbers by hand and against all resamples."""

import itertools

import numpy as np
import pytest

from rlhf_suite.report import statistics
from rlhf_suite.report.statistics import LEAST, interquartile_mean, interval, mean


def test_the_interquartile_mean_is_that_of_the_middle_half():
    assert interquartile_mean(np.array([100.0, 1, 2, 3, 4, 5, 6, -50])) == pytest.approx((2 + 3 + 4 + 5) / 4)
    assert interquartile_mean(np.array([1.0, 2, 9])) == 4.0, "of three values none is left out"
    assert interquartile_mean(np.array([[4.0, 0, 1, 2], [0.0, 0, 0, 8]])).tolist() == [1.5, 0.0]


@pytest.mark.parametrize("statistic", [mean, interquartile_mean])
@pytest.mark.parametrize("values", [[0.1, 0.4, 0.5, 0.9], [1.0, 2.0, 4.0, 8.0, 16.0]])
def test_an_interval_is_that_of_all_resamples(values, statistic, monkeypatch):
    monkeypatch.setattr(statistics, "LEAST", 0)
    monkeypatch.setattr(statistics, "FEW", 0)
    everything = statistic(np.array([*itertools.product(values, repeat=len(values))]))
    expected = np.quantile(everything, [0.025, 0.975])
    spread = max(values) - min(values)
    assert interval(np.array(values), statistic) == pytest.approx(tuple(expected), abs=0.03 * spread)


def test_an_interval_of_many_values_is_that_of_the_normal_distribution():
    values = np.random.default_rng(1).normal(3.0, 2.0, 400)
    error = 1.96 * values.std() / np.sqrt(len(values))
    assert interval(values, mean) == pytest.approx((values.mean() - error, values.mean() + error), abs=0.02)


@pytest.mark.notices("two runs have an interval", "report/statistics.py", "LEAST = 5", "LEAST = 2")
@pytest.mark.parametrize("statistic", [mean, interquartile_mean])
def test_fewer_than_five_runs_have_no_interval_and_equal_runs_have_one_without_width(statistic):
    assert [interval(np.arange(runs) / 4, statistic) for runs in range(1, LEAST)] == [None] * 4
    assert interval(np.array([0.5] * LEAST), statistic) == (0.5, 0.5)


@pytest.mark.notices(
    "the deviation of a trimmed mean is that of all values",
    "report/statistics.py",
    "values.clip(kept[0], kept[-1]).std(ddof=1)",
    "values.std(ddof=1)",
)
def test_the_interval_of_a_few_values_is_students():
    """Of 1, 2, 3, 4, 10: mean 4, variance 12.5, t = 2.7764 at four degrees of freedom. Without the ends, 2, 3, 4: mean
    3, and 2, 2, 3, 4, 4 of variance 1, t = 4.3027 at two."""
    values, error = np.array([10.0, 3, 1, 4, 2]), 2.7764 * (12.5 / 5) ** 0.5
    assert interval(values, mean) == pytest.approx((4 - error, 4 + error), rel=1e-4)
    error = 4.3027 / (0.6 * 5**0.5)
    assert interval(values, interquartile_mean) == pytest.approx((3 - error, 3 + error), rel=1e-4)


@pytest.mark.parametrize("statistic", [mean, interquartile_mean])
@pytest.mark.parametrize("runs", [5, 6, 7, 8, 9, 12])
def test_an_interval_covers_the_truth_about_as_often_as_it_says(runs, statistic):
    draws = np.random.default_rng(runs).normal(size=(1000, runs))
    found = [interval(each, statistic) for each in (draws if runs < 10 else draws[:200])]
    assert 0.89 <= np.mean([low <= 0 <= high for low, high in found]) <= 0.99
