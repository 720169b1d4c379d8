"""How far scores agree with labels, and a judge with itself."""

from __future__ import annotations

import pytest

from rlhf_suite.offline.agreement import measure_agreement, measure_repetition
from rlhf_suite.rewards.base import Outcome, RewardFailure, Sample, Scored

NONE = RewardFailure("no", "error")


def sample(prompt: str, label: str) -> Sample:
    return Sample(query="", prompt=prompt, response="", label=label, datasource="default")


def scored(*rewards: float | None) -> list[Outcome]:
    return [NONE if reward is None else Scored(reward, reward) for reward in rewards]


@pytest.mark.notices(
    "pairs with equal scores count as right",
    "offline/agreement.py",
    "(right + ties / 2) / len(gaps)",
    "(right + ties) / len(gaps)",
)
def test_pairs_are_rows_of_a_prompt_with_different_labels():
    samples = [sample("a", "1"), sample("a", "0"), sample("a", "0.0"), sample("b", "2"), sample("b", "1e0")]
    # a: 1 beats both zeros, right once and equal once; b: wrong; the two zeros are not a pair
    assert measure_agreement(samples, scored(0.5, 0.1, 0.5, 0.2, 0.9)) == {
        "pairs": 3,
        "pairs_without_verdict": 0,
        "pair_accuracy": 1.5 / 3,
        "pair_ties": 1 / 3,
    }


def test_a_pair_without_a_verdict_counts_neither_as_right_nor_as_wrong():
    samples = [sample("a", "0"), sample("a", "1"), sample("b", "0"), sample("b", "1")]
    found = measure_agreement(samples, scored(0.0, None, 0.0, 1.0))
    assert found == {"pairs": 2, "pairs_without_verdict": 0.5, "pair_accuracy": 1, "pair_ties": 0}
    assert measure_agreement(samples[:2], scored(0.0, None)) == {"pairs": 1, "pairs_without_verdict": 1}


@pytest.mark.parametrize("labels", [("x", "y"), ("1", "1"), ("nan", "1"), ("", "1")])
def test_labels_that_are_not_different_numbers_are_no_pairs(labels):
    assert measure_agreement([sample("a", label) for label in labels], scored(0.0, 1.0)) == {}


def test_a_judge_agrees_with_itself_where_it_says_the_same_again():
    found = measure_repetition(scored(0.5, 0.2, None, None), scored(0.5, 0.4, 0.1, None))
    assert found == {"no_verdict": 3 / 8, "self_agreement": 0.5, "self_difference": pytest.approx(0.1)}
