"""The first losses of the other supervised tasks, from their demos cut short."""

from __future__ import annotations

import pytest

from small_runs import column, small_run

# `python -m pytest tests/golden -s` prints the curves of today.
CURVES = {
    "rm": [0.69065, 0.67889, 0.69682, 0.68058, 0.68405],
    "dpo": [0.69315, 0.67846, 0.70256, 0.69166, 0.69751],
}


@pytest.mark.parametrize("task", CURVES)
def test_the_first_losses(ranks, tmp_path, task):
    line = f"task={task} train.max_steps=4 eval.max_samples=32"
    rows = ranks(1).call(small_run, tmp_path / "run", line)[0]
    curve = [*column(rows, "train/loss"), column(rows, "eval/loss")[-1]]
    print(task, [round(loss, 5) for loss in curve])
    assert curve == pytest.approx(CURVES[task], abs=1e-4)
