"""Sums over units: a batch split in any way adds up to the same loss, metric and number of units."""

from __future__ import annotations

import pytest
import torch

from rlhf_suite.losses.reduce import (
    counted_sum,
    mark_counted_sequences,
    masked_mean,
    masked_sum,
    num_units,
    token_weights,
    weighted_sum,
)
from rlhf_suite.registry import aggregation

# Three sequences of 3, 2 and 2 tokens; the second has no masked token.
VALUES = torch.tensor([1.0, 2, 4, 8, 16, 32, 64])
MASK = torch.tensor([0.0, 1, 1, 0, 0, 0, 1])
SEGMENTS = torch.tensor([0, 0, 0, 1, 1, 2, 2])


def test_token_mean_is_the_sum_over_masked_tokens_by_their_number():
    weights = token_weights(MASK, SEGMENTS, 3, "token-mean")
    assert weighted_sum(VALUES, weights) == 2 + 4 + 64
    assert num_units(MASK, SEGMENTS, 3, "token-mean") == 3


@pytest.mark.notices(
    "a mean over sequences divides by tokens", "losses/reduce.py", "(counts / whole).sum())", "mask.float().sum())"
)
def test_sequence_mean_is_the_sum_of_token_means_and_leaves_out_empty_sequences():
    weights = token_weights(MASK, SEGMENTS, 3, "seq-mean-token-mean")
    assert weighted_sum(VALUES, weights) == (2 + 4) / 2 + 64
    assert num_units(MASK, SEGMENTS, 3, "seq-mean-token-mean") == 2


@pytest.mark.notices(
    "Dr. GRPO's sums are divided by lengths",
    "losses/reduce.py",
    "Weights(mask.float() / horizon,",
    "Weights(mask.float() / mask.sum(),",
)
def test_the_normed_sum_divides_every_sequence_by_the_same_horizon():
    weights = token_weights(MASK, SEGMENTS, 3, "seq-mean-token-sum-norm", horizon=8)
    assert weighted_sum(VALUES, weights) == (2 + 4) / 8 + 64 / 8
    assert num_units(MASK, SEGMENTS, 3, "seq-mean-token-sum-norm") == 2


@pytest.mark.parametrize("mode", ["token-mean", "seq-mean-token-mean"])
def test_the_weights_of_a_batch_sum_to_its_units(mode):
    generator = torch.Generator().manual_seed(0)
    mask = (torch.rand(100, generator=generator) < 0.4).float()
    segments = torch.randint(0, 30, (100,), generator=generator).sort().values
    assert token_weights(mask, segments, 30, mode).sum().item() == pytest.approx(
        num_units(mask, segments, 30, mode).item()
    )


@pytest.mark.parametrize("mode", aggregation.names())
def test_splitting_a_batch_between_sequences_changes_nothing(mode):
    whole = weighted_sum(VALUES, token_weights(MASK, SEGMENTS, 3, mode))
    parts, units = torch.tensor(0.0), torch.tensor(0.0)
    for sequence in range(3):
        here = sequence == SEGMENTS
        segments = torch.zeros(int(here.sum()), dtype=torch.int64)
        parts += weighted_sum(VALUES[here], token_weights(MASK[here], segments, 1, mode))
        units += num_units(MASK[here], segments, 1, mode)
    assert parts == whole and units == num_units(MASK, SEGMENTS, 3, mode)


@pytest.mark.parametrize("mode", aggregation.names())
def test_a_batch_without_masked_tokens_weighs_nothing(mode):
    values = VALUES.clone().requires_grad_()
    weights = token_weights(torch.zeros(7), SEGMENTS, 3, mode)
    total = weighted_sum(values, weights)
    total.backward()
    assert total == 0 and num_units(torch.zeros(7), SEGMENTS, 3, mode) == 0
    assert values.grad is not None and not values.grad.any()


def test_what_stands_outside_the_mask_has_no_effect_not_even_nan():
    dirty = torch.where(MASK.bool(), VALUES, torch.nan).requires_grad_()
    masked_sum(dirty, MASK).backward()
    assert masked_sum(dirty, MASK) == 70
    assert weighted_sum(dirty, MASK) == 70
    assert dirty.grad is not None and torch.equal(dirty.grad, MASK)


def test_a_metric_carries_no_gradient():
    assert not masked_mean(VALUES.clone().requires_grad_(), MASK).total.requires_grad


def test_sequences_with_one_masked_token_or_more_count():
    assert mark_counted_sequences(MASK, SEGMENTS, 3).tolist() == [1, 0, 1]


def test_what_does_not_count_may_be_nan():
    values = torch.tensor([1.0, torch.nan, 4.0])
    assert counted_sum(values, torch.tensor([1.0, 0.0, 0.5])) == 5
