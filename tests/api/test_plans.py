"""Explanations and plans from Python are those of the command line."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

import rlhf_suite as rs
from rlhf_suite.cli import main

pytestmark = pytest.mark.stack
WORDS = ["task=ppo", "demo=ppo", "rollout.batch_size=32"]
SETTINGS = {"demo": "ppo", "rollout": {"batch_size": 32}}


def squeezed(text):
    """A text without what depends on the width of a console."""
    return "".join(character for character in text if character.isalnum())


def test_an_explanation_is_that_of_the_command_line(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "120")  # of the command line's console
    text = rs.explain("ppo", **SETTINGS)
    assert capsys.readouterr().out == ""
    assert main([*WORDS, "explain=true"]) == 0
    shown = capsys.readouterr().out
    assert "Placement" in text and squeezed(text) == squeezed(shown)
    assert text._repr_html_().startswith("<pre>")


@pytest.mark.parametrize("gpu", [None, "h100-80"])
def test_a_plan_is_that_of_the_command_line(capsys, gpu):
    plan = rs.plan("ppo", gpu=gpu, tflops=0.05, **SETTINGS)
    assert (plan.fits, plan.proposals) == (True, []) and capsys.readouterr().out == ""
    assert main(["plan", "--tflops=0.05", *([f"--gpu={gpu}"] if gpu else []), *WORDS]) == 0
    assert squeezed(str(plan)) == squeezed(capsys.readouterr().out)


def test_a_plan_that_does_not_fit_proposes_changes():
    plan = rs.plan("sft", demo="sft", memory=0.05)
    assert not plan.fits and "It does not fit" in str(plan)
    assert plan.estimate.peak > plan.estimate.target.usable


def test_mistakes_are_those_of_a_run():
    with pytest.raises(rs.ConfigurationError) as wrong:
        rs.explain("sft", actor={"adam": {"lr": -1}})
    assert [problem.key for problem in wrong.value.problems] == ["actor.adam.lr"]
    with pytest.raises(rs.UserError, match="only runs that train"):
        rs.plan("chat", model="builtin:tiny")
    with pytest.raises(rs.UserError, match="h101"):
        rs.plan("sft", gpu="h101", demo="sft")


def test_the_free_disk_is_that_of_the_run_folder(tmp_path):
    shared = Path("/dev/shm") / f"plan-{tmp_path.name}" / "run"
    for folder in (shared, tmp_path / "run"):
        free = shutil.disk_usage(folder.parents[1]).free
        planned = rs.plan("sft", demo="sft", tflops=0.05, run_dir=folder).estimate.target.disk
        assert planned == pytest.approx(free, abs=256 * 2**20)
