"""The picture of the last steps of a run: who was busy for which share of the time."""

from __future__ import annotations

import json

import pytest

from rlhf_suite.report import timeline
from rlhf_suite.report.timeline import draw_timeline
from rlhf_suite.tracking.run_folder import RunFolder


def record(folder, steps: int) -> None:
    """Steps of 10 seconds: generation takes 4, with tools for 3 of them, training 5, and the sync 1."""
    rows = [("driver", "weight_sync", -1, 0)]
    for step in range(steps):
        rows += [
            ("engines", "generation", 10 * step, 10 * step + 4),
            ("environments", "episodes", 10 * step + 1, 10 * step + 4),
            ("trainer", "ppo_train", 10 * step + 4, 10 * step + 9),
            ("driver", "weight_sync", 10 * step + 9, 10 * step + 10),
        ]
    lines = [json.dumps(dict(zip(("who", "what", "begin", "end"), row, strict=True))) for row in rows]
    (folder / "timeline.jsonl").write_text("\n".join(lines) + "\n")


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


def test_a_run_without_a_whole_step_has_no_picture(tmp_path):
    assert draw_timeline(RunFolder(tmp_path)) is None
    record(tmp_path, 0)
    assert draw_timeline(RunFolder(tmp_path)) is None
