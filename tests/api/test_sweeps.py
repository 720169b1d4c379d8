"""Sweeps from Python are those of the command line, and a run that fails is a row of their table."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import rlhf_suite as rs
from rlhf_suite.api.settings import ask
from rlhf_suite.api.sweeps import words_of_grid, words_of_seeds
from rlhf_suite.composition.arguments import parse
from rlhf_suite.polling import poll_until
from rlhf_suite.preflight.jobs import preflight
from rlhf_suite.run_folders.run_folder import RunFolder

START_S = 120.0


def good(row, config):
    return 1.0


def broken(row, config):
    raise ValueError("no such answer")


def test_a_grid_and_seeds_are_the_words_of_the_command_line():
    grid = {"actor": {"adam": {"lr": [1e-5, 3e-5]}}, "ds": ["zero2", "zero3"], "data.max_len": (64,)}
    words = [*words_of_grid("sft", grid), *words_of_seeds("sft", 2)]
    assert words == ["actor.adam.lr=1e-05,3e-05", "ds=zero2,zero3", "data.max_len=64", "train.seed=1,2"]
    ours = ask("sft", {"demo": "sft", "hydra/launcher": "local", "hydra.launcher.parallel": 2}, ["--multirun", *words])
    line = ["-m", "task=sft", "demo=sft", *words, "hydra/launcher=local", "hydra.launcher.parallel=2"]
    theirs = preflight(parse(line))
    assert theirs.problems == [] and ours.checked.runs == theirs.runs and len(theirs.runs) == 8
    assert ours.checked.hydra.launcher.parallel == theirs.hydra.launcher.parallel == 2


def test_values_of_a_grid_are_those_of_settings(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (word,) = words_of_grid("check_reward", {"reward": [good, broken]})
    assert word == f'reward.rule="{__file__}:good","{__file__}:broken"'
    (word,) = words_of_grid("sft", {"data": [[{"input": "a", "output": "b"}], "other.jsonl"]})
    assert word.startswith('data.dataset="outputs/data/rows_') and word.endswith(',"other.jsonl"')
    assert [*words_of_seeds("generate", [7, 9])] == ["rollout.seed=7,9"]


@pytest.mark.parametrize(
    ("task", "settings", "said"),
    [
        ("sft", {"grid": {"actor.adam.lr": "1e-5,3e-5"}}, "grid: actor.adam.lr='1e-5,3e-5' is not a list of values"),
        ("sft", {"grid": {"actor": {"adam": {"lr": 1e-5}}}}, "grid: actor.adam.lr=1e-05 is not a list of values"),
        ("sft", {"grid": {"actor.adam.lr": []}}, "grid: actor.adam.lr has no values"),
        ("ppo", {"grid": {"reward": [good, "maths"]}}, "grid: reward has values of reward and reward.rule"),
        ("sft", {"seeds": 0}, "seeds: 0: there are none"),
        ("merge_lora", {"seeds": 2}, "seeds: 2: task=merge_lora has no seed"),
        ("sft", {"demo": "sft", "seeds": 2, "train": {"seed": 5}}, "train.seed: is set twice"),
        ("chat", {"model": "builtin:tiny", "grid": {"chat.temperature": [0.5, 1.0]}}, "use rlhf-suite task=chat"),
    ],
)
def test_what_makes_no_sweep_is_refused(task, settings, said, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(rs.UserError) as refused:
        rs.sweep(task, **settings)
    assert said in str(refused.value)


@pytest.mark.notices(
    "the preflight of a sweep from Python checks no job but the first",
    "api/sweeps.py",
    'chain(["--multirun"], varied)',
    '["--multirun"]',
)
def test_the_mistakes_of_all_runs_are_known_before_the_first_one_starts(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(rs.ConfigurationError) as wrong:
        rs.sweep("sft", grid={"actor.adam.lr": [1e-5, -1.0], "train.batch_size": [0, 8]}, demo="sft")
    assert {problem.key for problem in wrong.value.problems} == {"actor.adam.lr", "train.batch_size"}
    assert [*tmp_path.iterdir()] == []


def test_a_folder_without_a_sweep_is_refused(tmp_path):
    with pytest.raises(rs.UserError, match="is not the folder of a sweep"):
        rs.load_sweep(tmp_path)


@pytest.mark.stack
def test_a_run_that_fails_is_a_row_with_its_reason(tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    sweep = rs.sweep("check_reward", grid={"reward": [broken, good]}, run_dir="sweep")
    assert "#1 done" in capfd.readouterr().out
    assert sweep.folder == tmp_path / "sweep" and [run.status for run in sweep.runs] == ["failed", "done"]
    table = sweep.table.to_dict("records")
    assert [(row["job"], row["state"]) for row in table] == [(0, "failed"), (1, "done")]
    assert [row["reward.rule"].rpartition(":")[2] for row in table] == ["broken", "good"]
    assert "no such answer" in table[0]["error"] and table[1]["error"] == ""
    assert table[1]["folder"] == str(sweep.runs[1].folder) and sweep.runs[1].results.items() <= table[1].items()
    assert rs.load_sweep("sweep").rows() == sweep.rows() and "no such answer" in sweep._repr_html_()


@pytest.mark.proof
@pytest.mark.notices(
    "the jobs of a sweep outlive it",
    "sweeps/local_jobs.py",
    '"rlhf_suite.cli.child", str(os.getpid()), *job.words',
    '"rlhf_suite.cli", *job.words',
)
@pytest.mark.parametrize(("number", "state"), [(signal.SIGINT, "stopped"), (signal.SIGKILL, "running")])
def test_the_runs_of_a_sweep_end_with_the_program_that_started_it(tmp_path, number, state):
    text = (
        "import signal, rlhf_suite as rs\nsignal.signal(2, signal.default_int_handler)\n"
        "rs.sweep('sft', seeds=1, demo='sft', run_dir='sweep', train={'max_epochs': 60}, logger={'progress': False})\n"
    )
    process = subprocess.Popen([sys.executable, "-c", text], cwd=tmp_path, stderr=subprocess.PIPE, text=True)
    record = RunFolder(tmp_path / "sweep" / "0")
    assert poll_until(lambda: record.metrics.exists() and "train/" in record.metrics.read_text(), START_S, 0.1)
    os.kill(process.pid, number)
    said = process.communicate()[1]
    assert number == signal.SIGKILL or "KeyboardInterrupt" in said
    worker = Path(f"/proc/{record.status()['pid']}")
    assert poll_until(lambda: not worker.exists(), START_S, 0.1)
    assert record.status()["state"] == state
    assert rs.load_sweep(tmp_path / "sweep").rows()[0]["state"] == "failed"
