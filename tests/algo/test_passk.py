"""pass@k by hand and by enumeration."""

from __future__ import annotations

import math
from itertools import combinations

import pytest

from rlhf_suite.algo.scores import over_prompts, pass_at_k


@pytest.mark.parametrize("num_correct", range(6))
@pytest.mark.parametrize("k", range(1, 6))
def test_pass_at_k_is_the_share_of_k_subsets_with_a_correct_sample(num_correct, k):
    samples = [True] * num_correct + [False] * (5 - num_correct)
    subsets = list(combinations(samples, k))
    assert pass_at_k(5, num_correct, k) == pytest.approx(sum(any(s) for s in subsets) / len(subsets))


def test_pass_at_1_is_the_share_of_correct_samples():
    assert pass_at_k(4, 1, 1) == 0.25


def test_large_counts_stay_exact():
    assert pass_at_k(10_000, 1, 100) == pytest.approx(0.01)


def test_more_samples_wanted_than_drawn_is_refused():
    with pytest.raises(AssertionError):
        pass_at_k(4, 1, 5)


@pytest.mark.notices(
    "the standard error is the deviation", "algo/scores.py", "math.sqrt(variance / count)", "math.sqrt(variance)"
)
def test_standard_error_is_between_prompts():
    estimate = over_prompts([0.0, 0.5, 1.0, 0.5])
    assert estimate.mean == 0.5
    assert estimate.standard_error == pytest.approx(math.sqrt((0.25 + 0.25) / 3 / 4))


def test_one_prompt_has_no_standard_error():
    estimate = over_prompts([0.25])
    assert estimate.mean == 0.25 and math.isnan(estimate.standard_error)
