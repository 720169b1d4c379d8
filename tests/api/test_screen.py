"""What a run that Python has started prints reaches every kind of output, and the run ends if it cannot."""

from __future__ import annotations

import io
import os
import subprocess
import sys
from dataclasses import dataclass

import pytest

from rlhf_suite.api.screen import Screen
from rlhf_suite.api.start import follow


@dataclass
class Result:
    """A result without a picture."""

    def stamp(self):
        return None

    def _repr_html_(self):
        return ""


class Closed(io.StringIO):
    """An output whose reader is gone."""

    def write(self, text):
        raise BrokenPipeError


@pytest.mark.parametrize(("encoding", "shown"), [("utf-8", "1 ± 2"), ("ascii", "1 \\xb1 2"), ("gbk", "1 ± 2")])
def test_characters_that_an_output_lacks_are_escaped(encoding, shown, monkeypatch):
    raw = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(raw, encoding=encoding))
    screen = Screen(Result())
    screen.write("1 ± 2")
    assert raw.getvalue().decode(encoding) == shown and screen.last_lines(1) == "1 ± 2"


@pytest.mark.stack
def test_a_run_whose_output_cannot_be_shown_ends(monkeypatch):
    started = []
    popen = subprocess.Popen
    monkeypatch.setattr(
        subprocess, "Popen", lambda *given, **named: started.append(popen(*given, **named)) or started[0]
    )
    monkeypatch.setattr(sys, "stdout", Closed())
    with pytest.raises(BrokenPipeError):
        follow(["task=sft", "demo=sft", "explain=true"], Screen(Result()))
    assert started[0].poll() is not None


def test_a_process_may_have_many_open_files(monkeypatch):
    """select() takes no file whose number is 1024 or more."""
    kept = [os.open(os.devnull, os.O_RDONLY) for _ in range(1100)]
    try:
        monkeypatch.setattr(sys, "stdout", io.StringIO())
        assert follow(["--version"], Screen(Result()))[0] == 0
    finally:
        for number in kept:
            os.close(number)
