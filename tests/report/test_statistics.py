"""Mean, interquartile mean and bootstrap intervals against numbers by hand and against all resamples."""

import itertools

import numpy as np
import pytest

from rlhf_suite.report import statistics
from rlhf_suite.report.statistics import interquartile_mean, interval, mean


def test_the_interquartile_mean_is_that_of_the_middle_half():
    assert interquartile_mean(np.array([100.0, 1, 2, 3, 4, 5, 6, -50])) == pytest.approx((2 + 3 + 4 + 5) / 4)
    assert interquartile_mean(np.array([1.0, 2, 9])) == 4.0, "of three values none is left out"
    assert interquartile_mean(np.array([[4.0, 0, 1, 2], [0.0, 0, 0, 8]])).tolist() == [1.5, 0.0]


@pytest.mark.parametrize("statistic", [mean, interquartile_mean])
@pytest.mark.parametrize("values", [[0.1, 0.4, 0.5, 0.9], [1.0, 2.0, 4.0, 8.0, 16.0]])
def test_an_interval_is_that_of_all_resamples(values, statistic, monkeypatch):
    monkeypatch.setattr(statistics, "FEW", 0)
    everything = statistic(np.array([*itertools.product(values, repeat=len(values))]))
    expected = np.quantile(everything, [0.025, 0.975])
    spread = max(values) - min(values)
    assert interval(np.array(values), statistic) == pytest.approx(tuple(expected), abs=0.03 * spread)


def test_an_interval_of_many_values_is_that_of_the_normal_distribution():
    values = np.random.default_rng(1).normal(3.0, 2.0, 400)
    error = 1.96 * values.std() / np.sqrt(len(values))
    assert interval(values, mean) == pytest.approx((values.mean() - error, values.mean() + error), abs=0.02)


def test_one_run_has_no_interval_and_equal_runs_have_one_without_width():
    assert interval(np.array([0.5]), mean) is None
    assert interval(np.array([0.5, 0.5, 0.5]), mean) == (0.5, 0.5)


def test_the_interval_of_a_few_values_is_students():
    """Of 1, 2, 6: mean 3, deviation sqrt(7); t = 4.3027 at two degrees of freedom."""
    error = 4.3027 * 7**0.5 / 3**0.5
    assert interval(np.array([2.0, 6.0, 1.0]), mean) == pytest.approx((3 - error, 3 + error), rel=1e-4)


@pytest.mark.parametrize("statistic", [mean, interquartile_mean])
@pytest.mark.parametrize("runs", [2, 3, 5, 9, 12])
def test_an_interval_covers_the_truth_about_as_often_as_it_says(runs, statistic):
    draws = np.random.default_rng(runs).normal(size=(1000, runs))
    found = [interval(each, statistic) for each in (draws if runs < 10 else draws[:200])]
    assert 0.89 <= np.mean([low <= 0 <= high for low, high in found]) <= 0.99
