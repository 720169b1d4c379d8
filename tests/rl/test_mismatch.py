"""How far engine and trainer may disagree before a run stops."""

from dataclasses import replace

import pytest
import torch

from rlhf_suite.config.algo import AdvantageConfig
from rlhf_suite.config.runs import PPORun
from rlhf_suite.data.batch import Example, collate
from rlhf_suite.data.trajectory import Experience
from rlhf_suite.errors import RunError
from rlhf_suite.rl.mismatch import check_mismatch, corrected, mismatch_limit


@pytest.fixture
def config() -> PPORun:
    config = PPORun()
    config.launch.device, config.ds.param_dtype = "cpu", "fp32"
    return config


def test_the_limit_is_that_of_the_precision_unless_the_flag_says_another(config, monkeypatch):
    assert mismatch_limit(config) == 1e-4
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    config.launch.device = "cuda"
    assert mismatch_limit(config) == 1e-2
    config.ds.param_dtype = "bf16"
    assert mismatch_limit(config) == 0.1
    config.algo.mismatch_max = 0.5
    assert mismatch_limit(config) == 0.5


def test_a_run_stops_past_the_limit_alone(config):
    check_mismatch(0.99e-4, config)
    with pytest.raises(RunError, match=r"1\.01e-04 on the rollout passes 1\.00e-04 \(algo\.mismatch_max\)"):
        check_mismatch(1.01e-4, config)
    with pytest.raises(RunError, match="nan"):
        check_mismatch(float("nan"), config)


def test_a_correction_that_leaves_no_token_stops_the_run_instead_of_training_on_nothing():
    batch = replace(
        collate([Example([5, 6, 7], [0, 1, 1])], Experience),
        old_log_probs=torch.tensor([0.0, -1.0, -1.0]),
        engine_log_probs=torch.tensor([0.0, -0.5, -0.9]),
    )
    left, metrics = corrected(batch, AdvantageConfig(is_correction_level="token", is_correction_threshold=[0.7, 2.0]))
    assert metrics["correction/masked"] == 0.5 and left.correction[1] == 0
    narrow = AdvantageConfig(is_correction_level="token", is_correction_threshold=[0.99, 2.0])
    with pytest.raises(RunError, match=r"drops every token.*is_correction_threshold=\[0\.99, 2\.0\].*0\.756.*Widen"):
        corrected(batch, narrow)
