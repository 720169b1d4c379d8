"""Raw scores become rewards."""

from __future__ import annotations

import pytest
import torch

from rlhf_suite.algo.shaping import clip_scores, normalize_scores


def test_scores_are_clamped_to_the_range():
    assert clip_scores(torch.tensor([-20.0, 0.5, 20.0]), [-10, 1]).tolist() == [-10, 0.5, 1]


def test_normalised_scores_are_in_units_of_the_deviation():
    assert normalize_scores(torch.tensor([1.0, 3.0]), mean=1.0, std=0.5).tolist() == [0, 4]


def test_a_deviation_of_zero_does_not_divide_by_zero():
    assert normalize_scores(torch.tensor([1.0, 2.0]), mean=1.0, std=0.0).tolist() == pytest.approx([0, 1e8])
