"""The learning curves of the example agents: which commands are run, and how the time of tools is found."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "benchmarks"))

import when_to_call  # noqa: E402
from agents import EXAMPLES, commands, table_line, tool_time  # noqa: E402


@pytest.mark.parametrize("example", [*EXAMPLES, when_to_call.EXAMPLE])
def test_the_commands_are_those_at_the_head_of_an_example(example):
    lines = commands(example)
    assert lines[-1].startswith("python run.py task=ppo ") and "\\" not in "".join(lines)
    for line in lines:
        assert line.split()[1] == "run.py" or (ROOT / line.split()[1]).is_file()
    text = " ".join((ROOT / f"experiments/agents/{example}/agent.py").read_text().replace("\\\n", " ").split())
    assert all(line in text for line in lines)
    assert text.count(" python ") == len(lines), "a command was left out"


def test_every_example_that_needs_nothing_else_has_a_curve():
    examples = {path.parent.name for path in (ROOT / "experiments/agents").glob("*/agent.py")}
    assert {*EXAMPLES, when_to_call.EXAMPLE} == examples - {"programs"}  # they have an environment of their own


def test_questions_of_the_two_kinds_have_columns_of_their_own():
    """Calls rise from 0.5 to 1 for one kind, and fall to 0 for the other."""
    rising, falling = {"calls": [0.5, 1, 1, 1], "right": [0.5, 1, 1, 1]}, {"calls": [0.5, 0, 0, 0], "right": [1] * 4}
    rows = [{"sum": rising, "given": falling}] * 2
    lines = [when_to_call.table_line(kind, rows) for kind in when_to_call.KINDS]
    assert lines[0].startswith("| the tool helps | 2 | 0.500 (0.500, 0.500) | 1.000 (1.000, 1.000) | 0.500")
    assert lines[1].startswith(
        "| the answer is in the question | 2 | 0.500 (0.500, 0.500) | 0.000 (0.000, 0.000) | 1.000"
    )


def test_the_time_of_tools_by_hand():
    """Steps from 10 to 14 and from 16 to 20; environments work for 3 s of them, for 1 s beside an engine."""
    steps = [{"time": 14.0, "timing/step_total": 4.0}, {"time": 20.0, "timing/step_total": 4.0}]
    busy = [("environments", 9, 11), ("environments", 13, 17), ("engines", 16.5, 18), ("trainer", 10, 10.5)]
    timeline = [{"who": who, "what": "", "begin": begin, "end": end} for who, begin, end in busy]
    found = tool_time(SimpleNamespace(steps=steps), timeline)
    assert found == {"tool_share": 3 / 8, "tool_share_alone": 2 / 8}


def test_a_row_of_the_table_has_means_and_ranges_over_seeds():
    rows = [
        {
            "right": [0.1 * seed, 0.5, 0.5, 0.8],
            "used": [1, 2, 2, 2],
            "seconds": 50,
            "tool_share": 0,
            "tool_share_alone": 0,
        }
        for seed in (1, 2)
    ]
    line = table_line("second_try", rows)
    assert "| 2 | 0.150 (0.100, 0.200) | 0.600 (0.600, 0.600) | 1.000 (1.000, 1.000) | 2.000" in line
    assert line.endswith("| 50 |")
