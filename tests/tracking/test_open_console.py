"""The console of tables: what is not a terminal has lines of any length, so that no value in a table is broken."""

from __future__ import annotations

import subprocess
import sys

from rlhf_suite.tracking.tables import open_console

PROGRAM = """
from rlhf_suite.tracking.tables import open_console, show_table
show_table(open_console(), "t", ("flag", "value"), [("a.b", "word " * 60), ("c.d", "x" * 300)])
"""


def printed(**variables):
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True, env={"TERM": "xterm", **variables}
    )
    return done.stdout


def test_a_value_in_a_pipe_is_on_one_line():
    lines = printed().splitlines()
    assert any("word " * 59 + "word" in line for line in lines)
    assert any("x" * 300 in line for line in lines)


def test_a_pipe_may_say_how_wide_it_is():
    assert max(map(len, printed(COLUMNS="60").splitlines())) <= 60


def test_a_terminal_has_its_width(monkeypatch):
    monkeypatch.setattr("rich.console.Console.is_terminal", property(lambda self: True))
    monkeypatch.setenv("COLUMNS", "70")
    assert open_console().width == 70
