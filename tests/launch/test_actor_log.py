"""The end of an actor's log, as errors quote it."""

from __future__ import annotations

import pytest

from rlhf_suite.launch.actor_log import TAIL_BYTES, TAIL_LINES, Member, tail_lines


@pytest.mark.notices(
    "the first lines of a log are quoted",
    "launch/actor_log.py",
    "list(deque(text.splitlines(), maxlen=count))",
    "text.splitlines()[:count]",
)
def test_the_last_lines_are_quoted_in_their_order(tmp_path):
    log = tmp_path / "actor-0.log"
    log.write_text("".join(f"line {number}\n" for number in range(100)))
    assert tail_lines(log) == [f"line {number}" for number in range(100 - TAIL_LINES, 100)]
    assert tail_lines(log, 2) == ["line 98", "line 99"]
    assert Member("actor-0", log).tail().splitlines()[-1] == "    line 99"


@pytest.mark.notices(
    "of a long log the beginning is looked at",
    "launch/actor_log.py",
    "text = file.read(TAIL_BYTES).decode",
    "file.seek(0)\n            text = file.read(TAIL_BYTES).decode",
)
def test_of_a_long_log_the_end_is_read(tmp_path):
    log = tmp_path / "actor-0.log"
    log.write_text("early\n" * TAIL_BYTES + "late\nlast\n")
    assert tail_lines(log, 2) == ["late", "last"]


def test_without_a_log_there_are_no_lines(tmp_path):
    assert tail_lines(tmp_path / "nothing.log") == []
    (tmp_path / "actor-1.log").touch()
    assert Member("actor-1", tmp_path / "actor-1.log").tail() == f"{tmp_path}/actor-1.log is empty"
