"""`python run.py -m ...`: a process per run, and a table at the end."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from importlib.util import find_spec

import jobs
import pytest

from pages import Page
from rlhf_suite.run_folders.record import load
from rlhf_suite.run_folders.run_folder import RunFolder


def sweep(folder, rates, *words):
    """The output of a sweep over learning rates."""
    command = ["-m", "task=sft", f"actor.adam.lr={rates}", "train.max_steps=2", f"hydra.sweep.dir={folder}", *words]
    done = subprocess.run(
        [sys.executable, str(jobs.ROOT / "run.py"), *command],
        cwd=jobs.ROOT,
        capture_output=True,
        text=True,
        timeout=jobs.DEADLINE_S,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def beside(tmp_path_factory):
    """The folder of a sweep of two runs beside each other, and what it said."""
    folder = tmp_path_factory.mktemp("beside") / "sweep"
    return folder, sweep(folder, "1e-3,1e-4", "hydra/launcher=local", "hydra.launcher.parallel=2")


def test_a_sweep_ends_with_a_table_of_its_runs(beside):
    check_table(*beside)


# Of the same launcher; the test of the same sweep again runs its jobs one after another too.
@pytest.mark.proof
def test_a_sweep_of_runs_one_after_another_ends_with_such_a_table(tmp_path):
    check_table(tmp_path / "sweep", sweep(tmp_path / "sweep", "1e-3,1e-4"))


def check_table(sweep_folder, said):
    """Of two runs, whose rates are 1e-3 and 1e-4."""
    table = [line for line in (sweep_folder / "summary.md").read_text().splitlines()[2:]]
    assert len(table) == 2
    rows = json.loads((sweep_folder / "summary.json").read_text())
    for number, (rate, line, row) in enumerate(zip(("0.001", "0.0001"), table, rows, strict=True)):
        assert line.startswith(f"| {number} | actor.adam.lr={rate} | done | eval/gpt_loss=")
        assert (row["state"], row["metric"]) == ("done", "eval/gpt_loss")
        assert f"actor.adam.lr={rate}" in said
        folder = RunFolder(sweep_folder / str(number))
        assert (folder.model / "model.safetensors").exists()
        names = load(folder.config).logger.wandb
        assert (names.group, names.run_name) == ("sweep", f"{number} actor.adam.lr={rate}")
    assert rows[0]["value"] < rows[1]["value"]  # the larger rate has learned more in two steps
    if find_spec("plotly") is not None:
        page = Page(sweep_folder / "report.html").data
        assert [group["values"] for group in page["sweep"]["groups"]] == [["0.001"], ["0.0001"]]
        assert [len(run["metrics"]["train/gpt_loss"][0]) for run in page["runs"]] == [2, 2]


def test_the_same_sweep_again_runs_what_is_missing(tmp_path, beside):
    """Of three jobs one is done, one has lost its run, and one is new."""
    folder = shutil.copytree(beside[0], tmp_path / "sweep")
    kept = (folder / "0" / "status.json").read_bytes()
    shutil.rmtree(folder / "1")
    said = sweep(folder, "1e-2,1e-3,1e-4", "ckpt.load_enable=true")
    assert "#0 is done already" in said and "#1 done after" in said and "#2 done after" in said
    assert (folder / "0" / "status.json").read_bytes() == kept
    rows = json.loads((folder / "summary.json").read_text())
    assert [(row["number"], row["state"]) for row in rows] == [(0, "done"), (1, "done"), (2, "done")]
    assert [load(folder / str(n) / "config.yaml").actor.adam.lr for n in range(3)] == [1e-3, 1e-4, 1e-2]
    assert all(row["seconds"] > 0 for row in rows)
