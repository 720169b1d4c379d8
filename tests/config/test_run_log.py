"""run.log has what a run says, once, in order, and nothing of a bar that is redrawn."""

from __future__ import annotations

import logging
import os
import sys
from contextlib import ExitStack

import pytest
from rich.console import Console
from rich.progress import Progress

from rlhf_suite.cli.run_log import outlast_console, record_output


def lines(path):
    return [line.split(" ", 2)[2] for line in path.read_text().splitlines()]


def test_what_is_said_on_the_console_is_there_and_in_the_log(tmp_path, capsys):
    with record_output(tmp_path / "run.log"):
        print("first")
        print("second ", end="")
        print("half", file=sys.stderr)
        print("and the rest")
        sys.stdout.write("the end")
    print("after")
    shown = capsys.readouterr()
    assert (shown.out, shown.err) == ("first\nsecond and the rest\nthe endafter\n", "half\n")
    assert lines(tmp_path / "run.log") == ["first", "half", "second and the rest", "the end"]


def test_a_continued_run_goes_on_below(tmp_path, capsys):
    for text in ("one", "two"):
        with record_output(tmp_path / "run.log"):
            print(text)
    assert lines(tmp_path / "run.log") == ["one", "two"]


def test_a_bar_leaves_its_last_state_and_the_lines_printed_above_it(tmp_path, capsys):
    with record_output(tmp_path / "run.log"):
        console = Console(force_terminal=True, width=60)
        with Progress(console=console, redirect_stdout=False, redirect_stderr=False) as bar:
            task = bar.add_task("sft", total=50)
            for step in range(50):
                bar.update(task, completed=step + 1)
                bar.refresh()
                if step == 20:
                    console.print("[red]an evaluation[/red]")
    kept = lines(tmp_path / "run.log")
    assert kept[0] == "an evaluation"
    assert len(kept) == 2 and kept[1].startswith("sft") and "100%" in kept[1]
    assert "\x1b" not in (tmp_path / "run.log").read_text()


def test_warnings_of_libraries_are_in_the_log(tmp_path, capsys):
    logger = logging.getLogger("some_library")
    logger.propagate = False  # a handler of the root logger may hold a stream that an earlier test closed
    with record_output(tmp_path / "run.log"):
        handler = logging.StreamHandler()
        logger.addHandler(handler)
        logger.warning("deprecated")
    logger.warning("said when the log is closed")
    logger.removeHandler(handler)
    assert lines(tmp_path / "run.log") == ["deprecated"]


def test_a_stream_is_still_itself(tmp_path):
    before = sys.stdout
    with record_output(tmp_path / "run.log"):
        assert sys.stdout.isatty() == before.isatty()
        assert sys.stdout.encoding == before.encoding
        sys.stdout.writelines(["a\n", "b\n"])
    assert sys.stdout is before
    assert lines(tmp_path / "run.log") == ["a", "b"]


def test_a_full_disk_does_not_silence_the_console(small, capsys):
    from full_disk import fill

    with record_output(small / "run.log"):
        fill(small)
        for _ in range(300):
            print("x" * 60)
    count = capsys.readouterr().out.count("\n")
    assert count == 300


def closed_terminal():
    """Return a terminal whose other end is gone, as the end of an ssh session leaves it."""
    other, console = os.openpty()
    os.close(other)
    return console


def closed_pipe():
    """Return a pipe whose reader has ended, such as `tee`."""
    reader, console = os.pipe()
    os.close(reader)
    return console


@pytest.mark.notices(
    "a run whose terminal is closed ends at the next line that it prints",
    "cli/run_log.py",
    "GONE = (errno.EPIPE, errno.EIO)",
    "GONE = (errno.EPIPE,)",
)
@pytest.mark.parametrize("is_recorded", [True, False])
@pytest.mark.parametrize("gone", [closed_terminal, closed_pipe])
def test_a_console_that_is_gone_ends_nothing(tmp_path, monkeypatch, gone, is_recorded):
    with os.fdopen(gone(), "w", buffering=1) as out, os.fdopen(gone(), "w", buffering=1) as error, ExitStack() as block:
        monkeypatch.setattr(sys, "stdout", out)
        monkeypatch.setattr(sys, "stderr", error)
        block.enter_context(record_output(tmp_path / "run.log") if is_recorded else outlast_console())
        for _ in range(3):
            print("to stdout", flush=True)
            print("to stderr", file=sys.stderr, flush=True)
            Console().print("by rich")
    if is_recorded:
        assert lines(tmp_path / "run.log") == ["to stdout", "to stderr", "by rich"] * 3
