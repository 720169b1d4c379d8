"""The first losses of the other supervised tasks, from their demos cut short."""

from __future__ import annotations

import pytest

from rlhf_suite.models.builtin import create_tiny
from small_runs import column, small_run

# `python -m pytest tests/golden -s` prints the curves of today.
CURVES = {
    "rm": [0.69065, 0.67889, 0.69682, 0.68058, 0.68405],
    "kto": [0.5, 0.50224, 0.4976, 0.49214, 0.50158],
    "prm": [1.03394, 0.49811, 0.31151, 0.36762, 0.37683],
    "distill": [3.45366, 2.93875, 2.69727, 2.57981, 2.46293],
    "dpo": [0.69315, 0.67846, 0.70256, 0.69166, 0.69751],
}


@pytest.mark.parametrize("task", CURVES)
def test_the_first_losses(ranks, tmp_path, task):
    teacher = " teacher.model_name_or_path=" + str(tiny(tmp_path)) if task == "distill" else ""
    line = f"task={task}{teacher} train.max_steps=4 eval.max_samples=32"
    rows = ranks(1).call(small_run, tmp_path / "run", line)[0]
    curve = [*column(rows, "train/loss"), column(rows, "eval/loss")[-1]]
    print(task, [round(loss, 5) for loss in curve])
    assert curve == pytest.approx(CURVES[task], abs=1e-4)


def tiny(folder):
    """A teacher with other random weights than the student's."""
    create_tiny(folder / "teacher", seed=1)
    return folder / "teacher"
