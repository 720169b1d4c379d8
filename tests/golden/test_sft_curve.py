"""The first losses of a fixed run. A change that is not meant to alter numbers must not alter these."""

from __future__ import annotations

from dataclasses import replace

import pytest

from rlhf_suite.config.declarations.data import DataConfig
from rlhf_suite.config.declarations.ds import DeepSpeedConfig
from rlhf_suite.config.declarations.eval import EvalConfig
from rlhf_suite.config.declarations.logger import LoggerConfig
from rlhf_suite.config.declarations.models import AdamConfig
from rlhf_suite.config.declarations.runs import Run
from rlhf_suite.config.declarations.train import TrainConfig
from rlhf_suite.run_folders.run_folder import RunFolder
from rlhf_suite.tracking.metrics import read_rows
from small_runs import run_task

# `python -m pytest tests/golden -s` prints the curve of today.
CURVE = [5.58893, 4.93214, 4.64977, 4.48499, 4.31727]
EVALUATION = 4.17414


def run_sft(world, folder, **changes):
    """`python run.py task=sft` of five steps; the loss of each, and of the evaluation after the last."""
    train = {name: value for name, value in changes.items() if name != "packing"}
    config = Run.of(
        "sft",
        actor=replace(
            Run.of("sft").actor,
            model_name_or_path="builtin:tiny",
            adam=AdamConfig(lr=1e-3),
            lr_scheduler="constant_with_warmup",
        ),
        data=DataConfig.of("sft", dataset="builtin:reverse", output_key="output", input_template=None, max_len=64),
        train=replace(TrainConfig.of("sft", batch_size=64, micro_batch_size=64, max_steps=5), **train),
        eval=EvalConfig.of("sft", dataset="builtin:reverse_eval"),
        ds=DeepSpeedConfig.of("sft", param_dtype="fp32", packing_samples=changes.get("packing", True)),
        logger=LoggerConfig(progress=False),
    )
    RunFolder(folder).start("golden")
    run_task(config, folder)
    rows = read_rows(RunFolder(folder).metrics)
    losses = [row["train/gpt_loss"] for row in rows if "train/gpt_loss" in row]
    return losses, rows[-1]["eval/gpt_loss"]


@pytest.fixture(scope="module")
def curve(ranks, tmp_path_factory):
    losses, evaluation = ranks(1).call(run_sft, tmp_path_factory.mktemp("run") / "golden")[0]
    print([round(loss, 5) for loss in losses], round(evaluation, 5))
    return losses, evaluation


def test_the_first_losses(curve):
    losses, evaluation = curve
    assert losses == pytest.approx(CURVE, abs=1e-4)
    assert evaluation == pytest.approx(EVALUATION, abs=1e-4)


def run_changed(world, folder, changes):
    return run_sft(world, folder, **changes)


@pytest.mark.parametrize(
    "changes",
    [
        {"packing": False},
        {"micro_batch_size": 16},
        {"micro_batch_size": 16, "packing": False},
        {"dynamic_batch_enable": True, "max_tokens_per_gpu": 700},
    ],
    ids=str,
)
def test_the_curve_is_the_same_however_the_batch_is_computed(ranks, tmp_path, curve, changes):
    losses, evaluation = ranks(1).call(run_changed, tmp_path / "run", changes)[0]
    assert losses == pytest.approx(curve[0], abs=1e-4)
    assert evaluation == pytest.approx(curve[1], abs=1e-4)
