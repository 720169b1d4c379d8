"""The area under the ROC curve by counting pairs, however the cases are split."""

from __future__ import annotations

import math

import pytest
import torch

from rlhf_suite.losses.metrics import Mean, Ranking


def ranking(scores, positive):
    scores, positive = torch.tensor(scores), torch.tensor(positive) > 0
    return Ranking(scores, positive, torch.ones_like(positive))


def auc(metric):
    return metric.of_columns(metric.columns())


def test_pairs_in_the_right_order_by_hand():
    """Of 2 x 3 pairs the first positive wins 3; the other ties with one and loses two."""
    assert auc(ranking([0.5, 0.1, 0.3, 0.2, 0.1], [1, 1, 0, 0, 0])) == pytest.approx((3 + 0.5) / 6)


def test_it_counts_pairs_of_any_scores_and_adds_up():
    generator = torch.Generator().manual_seed(0)
    scores, positive = (torch.randint(0, top, (80,), generator=generator) for top in (30, 2))
    halves = [(scores[part].float(), positive[part] > 0) for part in (slice(0, 33), slice(33, 33), slice(33, 80))]
    first, *rest = (Ranking(*half, torch.ones_like(half[1])).exact() for half in halves)
    pairs = [(a > b) + 0.5 * (a == b) for a in scores[positive > 0].tolist() for b in scores[positive == 0].tolist()]
    assert auc(sum(rest, first)) == pytest.approx(sum(pairs) / len(pairs))


def test_one_class_has_none_and_a_nan_is_not_hidden():
    assert auc(ranking([0.1, 0.2], [1, 1])) is None
    assert math.isnan(auc(ranking([0.1, math.nan, 0.2], [1, 0, 0])))


def test_what_is_added_up_is_in_float64():
    mean = Mean(torch.tensor(0.1), 3).exact()
    assert mean.total.dtype == mean.count.dtype == ranking([0.1], [1]).exact().scores.dtype == torch.float64
