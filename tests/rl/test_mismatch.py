"""How far engine and trainer may disagree before a run stops."""

from dataclasses import replace

import pytest
import torch

from rlhf_suite.config.declarations.algo import AdvantageConfig
from rlhf_suite.data.batch import Example, collate
from rlhf_suite.data.trajectory import Experience
from rlhf_suite.errors import RunError
from rlhf_suite.rl.mismatch import check_mismatch, correct, mismatch_limit


def test_the_limit_is_that_of_the_precision_unless_the_flag_says_another():
    assert mismatch_limit(None, "fp32", "cpu") == 1e-4
    assert mismatch_limit(None, "fp32", "cuda") == 1e-2
    assert mismatch_limit(None, "bf16", "cuda") == 0.1
    assert mismatch_limit(0.5, "bf16", "cuda") == 0.5


def test_a_run_stops_past_the_limit_alone():
    check_mismatch(0.99e-4, 1e-4)
    with pytest.raises(RunError, match=r"1\.01e-04, and algo\.mismatch_max allows 1\.00e-04"):
        check_mismatch(1.01e-4, 1e-4)
    with pytest.raises(RunError, match="nan"):
        check_mismatch(float("nan"), 1e-4)


def test_a_correction_that_leaves_no_token_stops_the_run_instead_of_training_on_nothing():
    batch = replace(
        collate([Example([5, 6, 7], [0, 1, 1])], Experience),
        old_log_probs=torch.tensor([0.0, -1.0, -1.0]),
        engine_log_probs=torch.tensor([0.0, -0.5, -0.9]),
    )
    left, metrics = correct(batch, AdvantageConfig(is_correction_level="token", is_correction_threshold=[0.7, 2.0]))
    assert metrics["correction/masked"] == 0.5 and left.correction[1] == 0
    narrow = AdvantageConfig(is_correction_level="token", is_correction_threshold=[0.99, 2.0])
    with pytest.raises(RunError, match=r"drops every token.*is_correction_threshold=\[0\.99, 2\.0\].*0\.756.*Widen"):
        correct(batch, narrow)
