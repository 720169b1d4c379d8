"""Engine against trainer."""

from __future__ import annotations

import math

import pytest
import torch

from rlhf_suite.algo.correction import Mismatch, mismatch


def test_mismatch_by_hand_over_masked_tokens_only():
    result = mismatch(torch.tensor([-1.0, -2.0, -9.0]), torch.tensor([-1.5, -1.0, 0.0]), torch.tensor([1.0, 1.0, 0.0]))
    assert result.mean_abs == 0.75 and result.max_abs == 1.0
    assert result.kl == pytest.approx((math.exp(-0.5) - 1 + 0.5 + math.exp(1.0) - 1 - 1.0) / 2)


def test_the_kl_of_tiny_differences_is_not_lost_in_rounding():
    engine = torch.full((4,), -1.0, dtype=torch.float64)
    assert mismatch(engine, engine - 1e-8, torch.ones(4)).kl == pytest.approx(0.5e-16, rel=1e-2, abs=0)


def test_no_tokens_no_mismatch():
    assert mismatch(torch.ones(2), torch.zeros(2), torch.zeros(2)) == Mismatch(0.0, 0.0, 0.0)
