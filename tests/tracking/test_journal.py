"""What is recorded of a step: metrics every few steps, each evaluation, and the seconds of each phase once."""

from __future__ import annotations

import pytest

from rlhf_suite.config.declarations.logger import LoggerConfig
from rlhf_suite.run_folders.run_folder import RunFolder
from rlhf_suite.tracking.journal import Journal
from rlhf_suite.tracking.metrics import read_rows


@pytest.fixture
def begun(tmp_path):
    def make(**config) -> Journal:
        folder = RunFolder(tmp_path)
        folder.start("")
        journal = Journal(LoggerConfig(progress=False, **config), folder, "sft")
        journal.open(0, 9)
        return journal

    return make


@pytest.mark.notices(
    "the seconds of a step are added to those of the next", "tracking/journal.py", "self.seconds.clear()", "pass"
)
def test_the_seconds_of_a_phase_are_recorded_once(begun, tmp_path):
    journal = begun()
    with journal.phase("train"):
        pass
    journal.log(1, {"loss": 3.0})
    with journal.phase("evaluation"):
        pass
    journal.log(1, {"eval/loss": 2.0}, always=True)
    journal.log(1, {"eval/acc": 1.0}, always=True)
    trained, evaluated, untimed = read_rows(tmp_path / "metrics.jsonl")
    assert "timing/step_total" not in untimed
    assert trained["timing/train"] == trained["timing/step_total"] > 0
    assert evaluated["timing/evaluation"] == evaluated["timing/step_total"] > 0
    assert "timing/train" not in evaluated


@pytest.mark.notices(
    "the first step was idle while models were loaded",
    "tracking/journal.py",
    "        self.timeline.open_window()\n",
    "",
)
def test_what_came_before_the_first_step_is_no_time_in_which_engines_were_idle(tmp_path):
    folder = RunFolder(tmp_path)
    folder.start("")
    journal = Journal(LoggerConfig(progress=False), folder, "ppo")
    created = journal.timeline.window_begin = 1.0
    journal.open(0, 9)
    assert journal.timeline.window_begin > created


@pytest.mark.notices(
    "an evaluation between two logged steps is lost", "tracking/journal.py", "if always or step", "if step"
)
def test_an_evaluation_is_recorded_also_between_two_logged_steps(begun, tmp_path):
    journal = begun(logging_steps=2)
    for step in (1, 2, 3):
        journal.log(step, {"loss": 1.0 * step})
        journal.log(step, {"eval/loss": 2.0 * step}, always=True)
    rows = read_rows(tmp_path / "metrics.jsonl")
    assert [(row["step"], row.get("loss"), row.get("eval/loss")) for row in rows] == [
        (1, None, 2.0), (2, 2.0, None), (2, None, 4.0), (3, None, 6.0)
    ]  # fmt: skip


def test_the_last_step_is_known_though_it_was_not_logged(begun, tmp_path):
    begun(logging_steps=2).log(3, {"loss": 1.0})
    assert RunFolder(tmp_path).status()["last_step"] == 3
