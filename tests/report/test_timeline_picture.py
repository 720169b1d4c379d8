"""The picture of the last steps of a run: who was busy for which share of the time."""

from __future__ import annotations

import json
import re
from datetime import UTC, datetime
from pathlib import Path

import pytest

import rlhf_suite
from rlhf_suite.report import timeline
from rlhf_suite.report.timeline import draw_timeline
from rlhf_suite.run_folders.run_folder import TIME, RunFolder


def record(folder, steps: int, start: int = 0) -> None:
    """Steps of 10 seconds: generation takes 4, with tools for 3 of them, training 5, and the sync 1."""
    rows = [("driver", "weight_sync", -1, 0)]
    for step in range(steps):
        rows += [
            ("engines", "generation", 10 * step, 10 * step + 4),
            ("environments", "episodes", 10 * step + 1, 10 * step + 4),
            ("trainer", "ppo_train", 10 * step + 4, 10 * step + 9),
            ("driver", "weight_sync", 10 * step + 9, 10 * step + 10),
        ]
    moved = [(who, what, begin + start, end + start) for who, what, begin, end in rows]
    lines = [json.dumps(dict(zip(("who", "what", "begin", "end"), row, strict=True))) for row in moved]
    with (folder / "timeline.jsonl").open("a") as file:
        file.write("\n".join(lines) + "\n")


@pytest.fixture
def drawn(monkeypatch):
    """The figures that are saved."""
    from matplotlib.figure import Figure  # takes long, also where this file's tests do not run

    figures, save = [], Figure.savefig
    monkeypatch.setattr(
        Figure, "savefig", lambda figure, *words, **more: figures.append(figure) or save(figure, *words, **more)
    )
    return figures


def test_a_row_for_each_who_was_busy_with_the_share_of_its_time(tmp_path, drawn):
    record(tmp_path, 9)
    assert draw_timeline(RunFolder(tmp_path)) == tmp_path / "timeline.png"
    assert (tmp_path / "timeline.png").read_bytes().startswith(b"\x89PNG")
    (axes,) = drawn[0].axes
    assert [label.get_text() for label in axes.get_yticklabels()] == [
        "engines",
        "environments",
        "trainer",
        "driver waits",
    ]
    assert [text.get_text() for text in axes.texts] == ["40%", "30%", "50%", "10%"]
    assert axes.get_xlim() == (0, 10 * timeline.STEPS)


def continued(folder, *seconds: int, started: int = 0) -> None:
    """Record that a run was continued at these times, and when it was started last."""
    RunFolder(folder).start("it")
    began, *times = [datetime.fromtimestamp(each, UTC).strftime(TIME) for each in (started, *seconds)]
    status = {"started": began, "resumes": [{"time": time, "step": 4} for time in times]}
    RunFolder(folder).status_file.write_text(json.dumps(RunFolder(folder).status() | status))


@pytest.mark.notices(
    "the timeline is that of the time in which the run was stopped",
    "report/timeline.py",
    "[-math.inf, *folder.starts(), math.inf]",
    "[-math.inf, math.inf]",
)
@pytest.mark.parametrize(("steps_since", "shown"), [(2, 19), (9, 10 * timeline.STEPS), (0, 10 * timeline.STEPS)])
@pytest.mark.parametrize("has_state", [True, False])
def test_the_time_in_which_a_run_was_stopped_is_not_in_the_picture(tmp_path, drawn, steps_since, shown, has_state):
    """It stood still for hours, and continued, or began again without a checkpoint; if no step has ended since, the
    steps before are shown."""
    record(tmp_path, 9)
    record(tmp_path, steps_since, start=20_000)
    continued(*([tmp_path, 19_990] if has_state else [tmp_path]), started=0 if has_state else 19_990)
    assert draw_timeline(RunFolder(tmp_path)) is not None
    assert drawn[0].axes[0].get_xlim() == (0, shown)


def test_times_that_cannot_be_read_are_left_out(tmp_path):
    continued(tmp_path, 100, 50)
    status = RunFolder(tmp_path).status()
    status["resumes"] += [{"time": "yesterday"}, {"time": 5}, {"step": 3}]
    RunFolder(tmp_path).status_file.write_text(json.dumps(status | {"started": "9999-99-99"}))
    assert RunFolder(tmp_path).starts() == [50.0, 100.0]


@pytest.mark.notices("all phases have one colour", "report/timeline.py", "COLOURS.get(phase, OTHER)", "OTHER")
def test_every_phase_has_a_colour_of_its_own():
    """Of those that the sources name. Training has one, whether it is that of RL or not."""
    calls = r"\b(?:phase|background|measured|builder\.wait|busy|Activity)"
    called = re.compile(calls + r"\((?:[\w.()]+, )*f?\"([a-z_{}]+)\"(?:, \"([a-z_]+)\")?")
    sources = [path.read_text() for path in Path(rlhf_suite.__file__).parent.rglob("*.py")]
    named = [match.groups() for text in sources for match in called.finditer(text)]
    lanes = {lane.who for lane in timeline.LANES}
    phases = {second if first in lanes and second else first for first, second in named} - {"waiting_for_{why}"}
    assert len(phases) > 10 and phases <= timeline.COLOURS.keys()
    colours = [timeline.colour_of(phase) for phase in timeline.COLOURS if phase != "train"]
    assert len({*colours, timeline.OTHER}) == len(colours) + 1
    assert timeline.colour_of("train") == timeline.colour_of("ppo_train")


def test_a_run_without_a_whole_step_has_no_picture(tmp_path):
    assert draw_timeline(RunFolder(tmp_path)) is None
    record(tmp_path, 0)
    assert draw_timeline(RunFolder(tmp_path)) is None
