"""Runs whose data format, loss and schedule are functions of the user's own, in a file outside of the checkout."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch

from rlhf_suite.config.declarations.models import TrainedModelConfig
from rlhf_suite.train.schedules import learning_rate_factor
from small_runs import column, small_run

EXAMPLE = Path(__file__).parents[2] / "experiments" / "own_code" / "own.py"


@pytest.fixture
def own(tmp_path):
    return shutil.copy(EXAMPLE, tmp_path / "own.py")


def test_rows_of_another_format_train_a_model_by_an_own_schedule(ranks, own, tmp_path):
    rows = [{"problem": f"{number} + 1", "solution": str(number + 1) if number % 4 else None} for number in range(64)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    line = (
        f"task=sft demo=sft data.dataset={tmp_path}/rows.jsonl data.row_format={own}:question_and_answer "
        f"actor.lr_scheduler={own}:square_root actor.lr_warmup_ratio=0 train.batch_size=16 train.max_epochs=1 "
        "eval.dataset=null eval.steps=-1 train.micro_batch_size=16 data.input_template=null"
    )
    metrics = ranks(1).call(small_run, tmp_path / "run", line)[0]
    rates = column(metrics, "train/lr")
    assert len(rates) == 3, "a quarter of 64 rows has no answer"
    assert [rate / rates[0] for rate in rates] == pytest.approx([1, (2 / 3) ** 0.5, (1 / 3) ** 0.5])


def test_a_preference_loss_of_ones_own_is_what_is_trained(ranks, own, tmp_path):
    line = f"task=dpo demo=dpo algo.loss={own}:exponential train.max_steps=2 eval.max_samples=8"
    metrics = ranks(1).call(small_run, tmp_path / "run", line)[0]
    assert column(metrics, "train/loss")[0] == pytest.approx(1), "exp(-0) where policy and reference are the same"
    assert column(metrics, "train/loss")[1] < 1


def test_a_schedule_of_transformers_is_that_of_transformers():
    from transformers import get_scheduler

    config = TrainedModelConfig.of("ppo", lr_scheduler="cosine_with_restarts", lr_warmup_ratio=0.0, lr_cycles=3)
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=1.0)
    theirs = get_scheduler("cosine_with_restarts", optimizer, 0, 20, scheduler_specific_kwargs={"num_cycles": 3})
    for step in range(20):
        assert learning_rate_factor(step, 20, config) == theirs.get_last_lr()[0]
        optimizer.step()
        theirs.step()
