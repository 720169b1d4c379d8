"""`python run.py -m ...`: a process per run, and a table at the end."""

from __future__ import annotations

import json
import subprocess
import sys

import jobs
import pytest

from rlhf_suite.config.record import load
from rlhf_suite.tracking.run_folder import RunFolder


@pytest.mark.parametrize("launcher", [[], ["hydra/launcher=local", "hydra.launcher.parallel=2"]])
def test_a_sweep_ends_with_a_table_of_its_runs(tmp_path, launcher):
    words = ["-m", "task=sft", "actor.adam.lr=1e-3,1e-4", "train.max_steps=2", f"hydra.sweep.dir={tmp_path / 'sweep'}"]
    done = subprocess.run(
        [sys.executable, str(jobs.ROOT / "run.py"), *words, *launcher],
        cwd=jobs.ROOT,
        capture_output=True,
        text=True,
        timeout=jobs.DEADLINE_S,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    table = [line for line in (tmp_path / "sweep" / "summary.md").read_text().splitlines()[2:]]
    assert len(table) == 2
    rows = json.loads((tmp_path / "sweep" / "summary.json").read_text())
    for number, (rate, line, row) in enumerate(zip(("0.001", "0.0001"), table, rows, strict=True)):
        assert line.startswith(f"| {number} | actor.adam.lr={rate} | done | eval/gpt_loss=")
        assert (row["state"], row["metric"]) == ("done", "eval/gpt_loss")
        assert f"actor.adam.lr={rate}" in done.stdout
        folder = RunFolder(tmp_path / "sweep" / str(number))
        assert (folder.model / "model.safetensors").exists()
        names = load(folder.config).logger.wandb
        assert (names.group, names.run_name) == ("sweep", f"{number} actor.adam.lr={rate}")
    assert rows[0]["value"] < rows[1]["value"]  # the larger rate has learned more in two steps
