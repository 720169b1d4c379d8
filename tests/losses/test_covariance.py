"""Tokens that are chosen by the covariance of log-prob and advantage: by the formula, whole numbers of them, and the
same whatever the arrangement of the rollout."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from rlhf_suite.losses.covariance import choose_in_band, choose_largest, covariances

float64 = torch.float64
LOG_PROBS, ADVANTAGES = [-1.0, -5.0, 9.0, -0.5, -2.0, -0.1, -4.0, 9.0], [2.0, -1.0, 9.0, 0.5, -2.0, 1.0, 1.5, -9.0]
MASK = [1.0, 1.0, 0.0, 1.0, 1.0, 1.0, 1.0, 0.0]


def tensors(*lists: list[float]) -> list[torch.Tensor]:
    return [torch.tensor(values, dtype=float64) for values in lists]


def by_formula(log_probs: list[float], advantages: list[float], mask: list[float]) -> list[float]:
    """(log pi - mean) (A - mean) over the masked tokens; 0 elsewhere."""
    rows = [(log_prob, a) for log_prob, a, counted in zip(log_probs, advantages, mask, strict=True) if counted]
    centres = [math.fsum(column) / len(rows) for column in zip(*rows, strict=True)]
    return [
        (log_prob - centres[0]) * (a - centres[1]) if counted else 0.0
        for log_prob, a, counted in zip(log_probs, advantages, mask, strict=True)
    ]


@pytest.mark.notices(
    "covariances are those of all tokens",
    "losses/covariance.py",
    "    is_masked = mask.bool()\n",
    "    is_masked = torch.ones_like(mask).bool()\n",
)
@pytest.mark.notices(
    "covariances are products without means",
    "losses/covariance.py",
    "kept - kept.sum() / count, 0)",
    "kept, 0)",
)
def test_covariances_are_those_of_the_masked_tokens():
    found = covariances(*tensors(LOG_PROBS, ADVANTAGES, MASK))
    assert found.tolist() == pytest.approx(by_formula(LOG_PROBS, ADVANTAGES, MASK), rel=1e-12)


@pytest.mark.notices(
    "KL-Cov holds the smallest covariances back",
    "losses/covariance.py",
    "least = np.partition(values, len(values) - count)[len(values) - count]",
    "least = np.partition(values, count - 1)[count - 1]",
)
@pytest.mark.parametrize(("share", "count"), [(1e-4, 1), (0.17, 1), (0.34, 2), (0.5, 3), (1.0, 6)])
def test_the_largest_covariances_are_a_share_of_the_masked_tokens(share, count):
    covariance, mask = covariances(*tensors(LOG_PROBS, ADVANTAGES, MASK)), torch.tensor(MASK)
    chosen = choose_largest(covariance, mask, share)
    order = sorted((place for place in range(8) if MASK[place]), key=lambda place: -covariance[place])
    assert torch.nonzero(chosen)[:, 0].tolist() == sorted(order[:count])


def test_of_equal_covariances_the_first_are_chosen():
    equal = torch.ones(6, dtype=float64)
    assert choose_largest(equal, torch.tensor([0.0, 1, 1, 1, 1, 0]), 0.5).tolist() == [False, True, True, *[False] * 3]


@pytest.mark.notices(
    "Clip-Cov leaves all tokens of the band out",
    "losses/covariance.py",
    "count = min(count_share(mask, share), len(candidates))",
    "count = len(candidates)",
)
@pytest.mark.notices(
    "the band of Clip-Cov has no upper end",
    "losses/covariance.py",
    "(covariance > low) & (covariance < high)",
    "(covariance > low)",
)
def test_clip_cov_draws_a_share_of_the_tokens_within_the_band():
    covariance = torch.linspace(0, 10, 1000, dtype=float64)
    mask = (torch.arange(1000) % 2).float()
    within = mask.bool() & (covariance > 2) & (covariance < 4)
    for seed in range(20):
        chosen = choose_in_band(covariance, mask, [2.0, 4.0], 0.02, np.random.default_rng(seed))
        assert int(chosen.sum()) == 10 and not (chosen & ~within).any()
    draws = {
        tuple(choose_in_band(covariance, mask, [2.0, 4.0], 0.02, np.random.default_rng(s)).tolist()) for s in (1, 2)
    }
    assert len(draws) == 2, "another seed draws others"
    assert torch.equal(choose_in_band(covariance, mask, [2.0, 4.0], 1.0, np.random.default_rng(0)), within)
    assert not choose_in_band(covariance, mask, [20.0, 40.0], 1.0, np.random.default_rng(0)).any()


def test_a_rollout_without_tokens_has_none_that_could_be_chosen():
    nothing = torch.zeros(3)
    covariance = covariances(nothing, nothing, nothing)
    assert not choose_largest(covariance, nothing, 0.5).any()
    assert not choose_in_band(covariance, nothing, [-1.0, 1.0], 0.5, np.random.default_rng(0)).any()
