"""Engine against trainer: what is measured, and the weights that correct for it, by hand and by identity."""

from __future__ import annotations

import math

import pytest
import torch

from rlhf_suite.algo import correction
from rlhf_suite.algo.correction import (
    CorrectionInput,
    band,
    correction_metrics,
    correction_weights,
    mismatch,
)
from rlhf_suite.config.declarations.algo import AdvantageConfig

RATIOS = [1.0, 4.0, 0.25, 9.0, 1.1, 1.2]  # of trainer to engine; the fourth token is not the model's
MASK = [1.0, 1.0, 1.0, 0.0, 1.0, 1.0]
SEGMENTS = [0, 0, 1, 1, 2, 2]


def given(ratios=RATIOS, engine=0.1, mask=MASK, segments=SEGMENTS) -> CorrectionInput:
    """Tokens to which the engine gives one probability, and the trainer `ratios` times it."""
    q = torch.full((len(ratios),), engine, dtype=torch.float64).log()
    p = q + torch.tensor(ratios, dtype=torch.float64).log()
    return CorrectionInput(p, q, torch.tensor(mask), torch.bincount(torch.tensor(segments)))


def config(level, mode="mask", gating="ratio", threshold=(0.5, 2.0)) -> AdvantageConfig:
    return AdvantageConfig(
        is_correction_level=level,
        is_correction_mode=mode,
        is_correction_gating=gating,
        is_correction_threshold=list(threshold),
    )


def weights(setting: AdvantageConfig, **inputs) -> list[float]:
    return correction_weights(given(**inputs), setting).tolist()


@pytest.mark.notices(
    "the correction is upside down",
    "algo/correction.py",
    "old_log_probs - engine_log_probs, 0)",
    "engine_log_probs - old_log_probs, 0)",
)
def test_tokens_outside_the_band_are_dropped():
    assert weights(config("token")) == pytest.approx([1.0, 0, 0, 0, 1.1, 1.2])


def test_tokens_outside_the_band_are_bounded():
    assert weights(config("token", "clip")) == pytest.approx([1.0, 2.0, 0.5, 0, 1.1, 1.2])


def test_one_threshold_is_an_upper_bound():
    assert band(config("token", threshold=[2.0])) == (0.0, 2.0)
    assert weights(config("token", "clip", threshold=[2.0])) == pytest.approx([1.0, 2.0, 0.25, 0, 1.1, 1.2])


def test_sequences_go_by_the_geometric_mean_and_keep_their_own_weights():
    """Means: 2, 0.25, sqrt(1.32); the band holds its ends."""
    assert weights(config("seq")) == pytest.approx([1.0, 4.0, 0, 0, 1.1, 1.2])


def test_geo_gives_a_sequence_one_weight():
    mean = math.sqrt(1.32)
    assert weights(config("geo")) == pytest.approx([2.0, 2.0, 0, 0, mean, mean])
    assert weights(config("geo", "clip", threshold=[0.5, 1.5])) == pytest.approx([1.5, 1.5, 0.5, 0, mean, mean])


def test_divergences_gate_and_the_ratio_weighs():
    """The engine says 0.1. |q - p|: 0, 0.3, 0.075, 0.01, 0.02."""
    assert weights(config("token", gating="tv", threshold=[0.05])) == pytest.approx([1.0, 0, 0, 0, 1.1, 1.2])
    assert weights(config("seq", gating="tv", threshold=[0.1])) == pytest.approx([0, 0, 0.25, 0, 1.1, 1.2])
    kl = 0.1 * math.log(0.1 / 0.4) + 0.9 * math.log(0.9 / 0.6)
    for threshold, kept in ((kl * 1.001, 4.0), (kl * 0.999, 0.0)):
        assert weights(config("token", gating="binary_kl", threshold=[threshold]))[1] == pytest.approx(kept)


@pytest.mark.parametrize("level", ["token", "seq", "geo"])
@pytest.mark.parametrize("gating", ["ratio", "binary_kl", "tv"])
def test_where_nothing_differs_every_weight_is_one(level, gating):
    threshold = [0.5, 2.0] if gating == "ratio" else [1e-3]
    inputs = given([1.0] * 6)
    found = correction_weights(inputs, config(level, "mask", gating, threshold))
    assert found.tolist() == MASK
    metrics = correction_metrics(inputs, found)
    assert metrics == pytest.approx(
        {"correction/masked": 0, "correction/ratio": 1, "correction/chi2": 0, "correction/ess": 1}, abs=1e-12
    )


def test_importance_weights_have_a_mean_of_one_under_the_engine():
    """Every token of a distribution, as often as the engine says it: what makes the correction unbiased."""
    q, p = torch.tensor([0.5, 0.3, 0.2]), torch.tensor([0.2, 0.3, 0.5])
    inputs = CorrectionInput(p.log(), q.log(), torch.ones(3), torch.ones(3, dtype=torch.int64))
    found = correction_weights(inputs, config("token", "clip", threshold=[100.0]))
    assert float((q * found).sum()) == pytest.approx(1.0)


def test_metrics_by_hand():
    inputs = given([1.0, 3.0], mask=[1.0, 1.0], segments=[0, 1])
    metrics = correction_metrics(inputs, correction_weights(inputs, config("token")))
    assert metrics == pytest.approx(
        {"correction/masked": 0.5, "correction/ratio": 2, "correction/chi2": 4, "correction/ess": 0.5}
    )
    inputs = given([1.0, 3.0], mask=[0.0, 0.0], segments=[0, 1])
    assert correction_metrics(inputs, correction_weights(inputs, config("token"))) == {}


@pytest.mark.parametrize("level", ["token", "seq", "geo"])
@pytest.mark.parametrize("mode", ["mask", "clip"])
def test_extreme_differences_stay_finite(level, mode):
    engine, trainer = torch.tensor([0.0, -1e4, -1.0]), torch.tensor([-1e4, 0.0, -1.0])
    inputs = CorrectionInput(trainer, engine, torch.ones(3), torch.ones(3, dtype=torch.int64))
    for gating in ("ratio", "binary_kl", "tv"):
        found = correction_weights(inputs, config(level, mode, gating, [2.0]))
        assert found.isfinite().all() and found[2] > 0
        assert all(map(math.isfinite, correction_metrics(inputs, found).values()))


def test_mismatch_by_hand_over_masked_tokens_only():
    result = mismatch(torch.tensor([-1.0, -2.0, -9.0]), torch.tensor([-1.5, -1.0, 0.0]), torch.tensor([1.0, 1.0, 0.0]))
    assert result.mean_abs == 0.75 and result.max_abs == 1.0
    assert result.kl == pytest.approx((math.exp(-0.5) - 1 + 0.5 + math.exp(1.0) - 1 - 1.0) / 2)


def test_the_kl_of_tiny_differences_is_not_lost_in_rounding():
    engine = torch.full((4,), -1.0, dtype=torch.float64)
    assert mismatch(engine, engine - 1e-8, torch.ones(4)).kl == pytest.approx(0.5e-16, rel=1e-2, abs=0)


def test_no_tokens_no_mismatch():
    assert mismatch(torch.ones(2), torch.zeros(2), torch.zeros(2)) is None


@pytest.mark.parametrize("level", ["token", "seq"])
def test_tokens_on_which_engine_and_trainer_agree_best_pass_a_divergence_gate(level):
    """The rounding of a divergence near 0 is often negative, and one upper bound must keep all such tokens."""
    engine = torch.linspace(0.001, 0.999, 4001, dtype=torch.float64).log()
    count = len(engine)
    inputs = CorrectionInput(engine + 1e-9, engine, torch.ones(count), torch.ones(count, dtype=torch.int64))
    found = correction_weights(inputs, config(level, gating="binary_kl", threshold=[0.05]))
    assert (found > 0).all()


def test_the_mismatch_of_many_tokens_is_measured_part_by_part(monkeypatch):
    numbers = torch.Generator().manual_seed(0)
    engine, trainer = (torch.randn(50, generator=numbers) for _ in range(2))
    mask = (torch.rand(50, generator=numbers) < 0.5).float()
    whole = mismatch(engine, trainer, mask)
    monkeypatch.setattr(correction, "SLAB", 7)
    parts = mismatch(engine, trainer, mask)
    assert (parts.mean_abs, parts.kl) == pytest.approx((whole.mean_abs, whole.kl), rel=1e-12)
    assert parts.max_abs == whole.max_abs
    inputs = CorrectionInput(trainer, engine, mask, torch.tensor([20, 30]))
    weights = correction_weights(inputs, config("token"))
    in_parts = correction_metrics(inputs, weights)
    monkeypatch.setattr(correction, "SLAB", 100)
    assert in_parts == pytest.approx(correction_metrics(inputs, weights), rel=1e-12)
    assert math.isnan(mismatch(torch.full((9,), torch.nan), torch.zeros(9), torch.ones(9)).max_abs)


@pytest.mark.notices(
    "every part of a correction is written over the first one",
    "algo/correction.py",
    "weights[begin : begin + len(values)]",
    "weights[: len(values)]",
)
@pytest.mark.parametrize("level", ["token", "seq", "geo"])
@pytest.mark.parametrize("gating", ["ratio", "binary_kl"])
def test_the_weights_do_not_depend_on_how_many_sequences_are_weighed_at_a_time(monkeypatch, level, gating):
    """Every other sequence is far from what the engine wrote."""
    torch.manual_seed(0)
    lengths = torch.tensor([3, 1, 40, 7, 7, 0, 100, 2])
    old, mask = -torch.rand(160), (torch.rand(160) < 0.8).float()
    far = torch.tensor([0, 1, 0, 1, 0, 1, 0, 1]).repeat_interleave(lengths)
    inputs = CorrectionInput(old, old - torch.rand(160) / 1000 - far / 2, mask, lengths)
    threshold = (0.7, 1.3) if gating == "ratio" else (0.02,)
    flags = config(level, "mask", gating, threshold)
    whole = correction_weights(inputs, flags)
    assert 0 < (whole > 0).sum() < mask.sum()
    for size in (1, 5, 64):
        monkeypatch.setattr(correction, "SLAB", size)
        assert len([*inputs.parts()]) > 1
        assert torch.equal(correction_weights(inputs, flags), whole)
