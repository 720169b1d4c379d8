"""Runs from Python: the object of a run, and that a call and a command line are the same run."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import rlhf_suite as rs
from rlhf_suite.polling import poll_until
from rlhf_suite.run_folders.run_folder import RunFolder

ROOT = Path(__file__).resolve().parents[2]
STEPS = {
    "demo": "sft",
    "train": {"max_steps": 3},
    "eval": {"dataset": None, "steps": -1},
    "logger": {"progress": False},
}
WORDS = ["task=sft", "demo=sft", "train.max_steps=3", "eval.dataset=null", "eval.steps=-1", "logger.progress=false"]
START_S = 120.0
TEXT = "".join((ROOT / "docs" / page).read_text() for page in ("python.md", "python_client.md"))
BLOCKS = re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL)


def test_a_folder_without_a_run_is_refused(tmp_path):
    with pytest.raises(rs.UserError, match="is not the folder of a run"):
        rs.load(tmp_path)


def test_a_run_is_read_when_it_is_asked_for(tmp_path):
    record = RunFolder(tmp_path)
    record.start("x")
    run = rs.load(tmp_path)
    assert (run.status, run.last_step, run.model, run.report, len(run.metrics)) == ("running", 0, None, None, 0)
    record.metrics.write_text('{"step": 1, "time": 1.0, "train/loss": 2.0}\n')
    record.record_step(1)
    record.mark_done({"train/loss": 2.0})
    assert (run.status, run.last_step, run.results) == ("done", 1, {"train/loss": 2.0})
    assert run.metrics["train/loss"].tolist() == [2.0] and "<td>train/loss</td><td>2</td>" in run._repr_html_()
    with pytest.raises(rs.UserError, match=r"no samples of step 7 in rollouts/: it has none"):
        run.samples(7)
    record.rollouts.mkdir()
    for name in ("step_000002.parquet", "step_000010.parquet", "step_000010 (copy).parquet"):
        (record.rollouts / name).touch()
    with pytest.raises(rs.UserError, match=r"no samples of step 7 in rollouts/: it has those of steps 2, 10$"):
        run.samples(7)


def test_the_import_brings_nothing_heavy():
    heavy = "torch", "hydra", "omegaconf", "pandas", "rlhf_suite.config"
    code = f"import sys, rlhf_suite as rs; print([name for name in {heavy} if name in sys.modules], rs.UserError)"
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert said.startswith("[] ")


def test_every_name_of_the_package_is_there():
    assert {"run", "check", "load", "Run", "Problem", "ConfigurationError", "UserError", "RunError"} <= {*dir(rs)}
    assert all(getattr(rs, name) is not None for name in rs.NAMES)
    with pytest.raises(AttributeError, match="no attribute 'runn'"):
        rs.runn  # noqa: B018


@pytest.mark.proof
def test_a_call_and_a_command_line_end_in_the_same_weights(tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    run = rs.run("sft", **STEPS)
    assert (run.status, run.last_step, len(run.metrics)) == ("done", 3, 3)
    assert "Run folder: " in capfd.readouterr().out and run.report is not None
    command = [sys.executable, "-m", "rlhf_suite.cli", *WORDS, "run_dir=other"]
    subprocess.run(command, check=True, capture_output=True)
    ours, other = (folder / "model" / "model.safetensors" for folder in (run.folder, Path("other")))
    assert ours.read_bytes() == other.read_bytes()


@pytest.mark.proof
def test_an_interrupted_run_is_saved_and_goes_on(tmp_path):
    text = (
        "import os, rlhf_suite as rs\n"
        "try:\n    rs.run('sft', demo='sft', run_dir='run', train={'max_epochs': 60}, logger={'progress': False})\n"
        "except KeyboardInterrupt:\n    print(rs.load('run').status, rs.load('run').last_step, flush=True)\n"
        "    os._exit(0)\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", f"import signal; signal.signal(2, signal.default_int_handler)\n{text}"],
        cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip
    metrics = RunFolder(tmp_path / "run").metrics
    assert poll_until(lambda: metrics.exists() and "train/" in metrics.read_text(), START_S, 0.1)
    os.kill(process.pid, signal.SIGINT)
    ended = re.search(r"stopped (\d+)\s*$", process.communicate()[0])
    assert ended is not None and 0 < (step := int(ended[1])) < 3840
    assert [*(tmp_path / "run" / "checkpoints").glob(f"step_{step:06d}")]


@pytest.mark.proof
@pytest.mark.parametrize("block", BLOCKS, ids=range(len(BLOCKS)))
def test_the_examples_of_the_page_run(block, tmp_path):
    (tmp_path / "example.py").write_text(block)
    done = subprocess.run([sys.executable, "example.py"], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.proof
def test_a_run_that_fails_says_why(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "own.py").write_text("def broken(row, config):\n    raise ValueError('no such answer')\n")
    with pytest.raises(rs.RunError, match="no such answer"):
        rs.run("ppo", train={"max_steps": 1}, **{"reward.rule": "own.py:broken", "logger.progress": False})
