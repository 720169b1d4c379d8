"""Corrections of a user's own: a mode and a gating in one file weigh the tokens of a run as those of the suite do."""

from __future__ import annotations

import pytest
from plain_run import run, small

from rlhf_suite.composition.arguments import parse
from rlhf_suite.config.declarations.algo import AdvantageConfig
from rlhf_suite.preflight.jobs import preflight
from rlhf_suite.preflight.trial import algorithm
from rlhf_suite.registry import WrongResult, correction, gating
from rlhf_suite.tracking.metrics import read_rows

OWN = """
import torch
from rlhf_suite.algo.correction import band, of_units, unit_weights
from rlhf_suite.registry import correction, gating

@correction(needs=("unit_weight",), reads=("is_correction_threshold",))
def bounded(inputs, config):
    return unit_weights(inputs, config).clamp(*band(config))

@gating()
def place(inputs, config):
    return of_units(inputs.segments.double(), inputs, config)

def half(inputs, config):
    return torch.full_like(inputs.mask, 0.5, dtype=torch.float64)

def short(inputs, config):
    return inputs.log_weights[1:]
"""


@pytest.fixture
def own(tmp_path):
    file = tmp_path / "own.py"
    file.write_text(OWN)
    return file


def stale(**more: object):
    """Three steps by weights that are a step old, so that engine and trainer differ."""
    return small(train__num_episodes=2, train__async_enable=True, algo__advantage__is_correction_level="token", **more)


def trained(ranks, folder, **more: object):
    """Run, and return the weights and the metrics of the steps."""
    ranks(1).call(run, folder, stale(**more))
    rows = [row for row in read_rows(folder / "metrics.jsonl") if "correction/ratio" in row]
    return (folder / "model/model.safetensors").read_bytes(), rows


def problems_of(line: str):
    return preflight(parse(line.split())).problems


def test_an_own_mode_trains_the_weights_of_the_one_that_it_repeats(ranks, own, tmp_path):
    band = {"algo__advantage__is_correction_threshold": [0.999, 1.001]}
    theirs, rows = trained(ranks, tmp_path / "clip", algo__advantage__is_correction_mode="clip", **band)
    ours, _ = trained(ranks, tmp_path / "own", algo__advantage__is_correction_mode=f"{own}:bounded", **band)
    halved, half_rows = trained(ranks, tmp_path / "half", algo__advantage__is_correction_mode=f"{own}:half")
    assert any(abs(row["correction/ratio"] - 1) > 1e-4 for row in rows), "nothing would be corrected"
    assert ours == theirs != halved
    assert all(row["correction/ess"] == pytest.approx(1) and row["correction/masked"] == 0 for row in half_rows)


def test_an_own_gating_drops_what_is_outside_of_its_band(ranks, own, tmp_path):
    more = {"algo__advantage__is_correction_gating": f"{own}:place"}
    _, rows = trained(ranks, tmp_path, algo__advantage__is_correction_threshold=[0.5], **more)
    assert rows and all(0 < row["correction/masked"] < 1 for row in rows), "the first response alone is in the band"


def test_needs_and_reads_of_an_own_mode_decide_as_those_of_the_suite_do(own):
    line = f"task=ppo demo=ppo correction=tis algo.advantage.is_correction_mode={own}:"
    assert problems_of(f"{line}bounded") == []
    (problem,) = problems_of(f"{line}bounded algo.advantage.is_correction_level=seq")
    assert "write algo.advantage.is_correction_mode=mask" in problem.fix
    (problem,) = problems_of(f"{line}bounded algo.advantage.is_correction_gating=tv")
    assert problem.key == "algo.advantage.is_correction_gating"
    assert problems_of(f"{line}half algo.advantage.is_correction_level=seq") == []


def test_a_mode_that_returns_something_else_is_found_before_the_run(own):
    algorithm("correction", f"{own}:half")
    algorithm("gating", f"{own}:place")
    with pytest.raises(WrongResult, match=r"short returned Tensor of shape \[4\].*mode of the correction"):
        algorithm("correction", f"{own}:short")


def test_the_names_of_the_suite_are_those_of_the_flags():
    assert correction.names() == ("mask", "clip") and gating.names() == ("ratio", "binary_kl", "tv")
    assert AdvantageConfig().is_correction_mode in correction.names()
