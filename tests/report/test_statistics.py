"""Mean, interquartile mean and bootstrap intervals against numbers by hand and against all resamples."""

import itertools

import numpy as np
import pytest

from rlhf_suite.report.statistics import interquartile_mean, interval, mean


def test_the_interquartile_mean_is_that_of_the_middle_half():
    assert interquartile_mean(np.array([100.0, 1, 2, 3, 4, 5, 6, -50])) == pytest.approx((2 + 3 + 4 + 5) / 4)
    assert interquartile_mean(np.array([1.0, 2, 9])) == 4.0, "of three values none is left out"
    assert interquartile_mean(np.array([[4.0, 0, 1, 2], [0.0, 0, 0, 8]])).tolist() == [1.5, 0.0]


@pytest.mark.parametrize("statistic", [mean, interquartile_mean])
@pytest.mark.parametrize("values", [[0.1, 0.4, 0.5, 0.9], [1.0, 2.0, 4.0, 8.0, 16.0]])
def test_an_interval_is_that_of_all_resamples(values, statistic):
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
