"""Callbacks in whole runs: what is called when, and that a continued run goes on as if nothing had happened."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import watched

import rlhf_suite as rs

STEPS = {"demo": "sft", "train": {"max_steps": 6}, "logger": {"progress": False}, "callbacks": [watched.Watch]}


def calls(folder) -> list[list[object]]:
    """What was called, but for the rest of a step."""
    return [json.loads(line) for line in (Path(folder) / "calls.jsonl").read_text().splitlines()]


def test_a_continued_run_calls_them_as_if_nothing_had_happened(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    settings = STEPS | {"run_dir": str(tmp_path / "run"), "on_step": watched.fails_once}
    Path(watched.__file__).with_name("watched.mark").touch()
    with pytest.raises(rs.RunError, match=r"fails_once: on_step failed: watched\.py:\d+: ValueError: not yet"):
        rs.run("sft", **settings)
    first = calls(tmp_path / "run")
    assert first == [
        ["start", 0, 6],
        ["evaluation", 0],
        ["step", 1, 1, None, True],
        ["step", 2, 2, None, True],
        ["evaluation", 2],
        ["checkpoint", "step_000002"],
        ["step", 3, 3, None, True],
        ["end", "failed"],
    ]
    run = rs.run("sft", **settings, ckpt={"load_enable": True})
    assert run.status == "done" and run.last_step == 4 and run.model is not None
    assert calls(tmp_path / "run")[len(first) :] == [
        ["start", 2, 6],
        ["step", 3, 3, None, True],
        ["step", 4, 4, None, True],
        ["evaluation", 4],
        ["end", "done"],
    ]


@pytest.mark.proof
@pytest.mark.parametrize("asynchronous", [False, True])
def test_reinforcement_learning_gives_them_the_samples_of_each_step(tmp_path, monkeypatch, asynchronous):
    monkeypatch.chdir(tmp_path)
    train = {"max_steps": 6, "async_enable": asynchronous}
    others = {"correction": "tis"} if asynchronous else {}
    run = rs.run("ppo", **STEPS | others | {"demo": "ppo", "train": train, "run_dir": str(tmp_path / "run")})
    assert run.last_step == 4
    rows = [len(run.samples(step)) for step in range(1, 5)]
    assert [call[1:4] for call in calls(run.folder) if call[0] == "step"] == [
        [step, step, rows[step - 1]] for step in range(1, 5)
    ]
    assert ["evaluation", 2] in calls(run.folder) and ["checkpoint", "step_000002"] in calls(run.folder)
