"""The page of proofs for agents and asynchronous training: what its rows name exists, and it shows what was run."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))

import agent_proofs
from agent_proofs_list import ROWS, Cell, Count, Row, Saved

ROW = Row("It holds.", ("tests/algo/test_kl.py::test_estimators_by_hand",), mistakes=("KL is a bonus in the reward",))
RUN = {
    "tests": list(ROW.tests),
    "passed": True,
    "counts": {"tests": 3, "failures": 0, "errors": 0, "skipped": 0},
    "seconds": 2,
    "commit": "1234abcd",
    "date": "2026-01-02T03:04:05",
    "figures": {"error": [2.346e-7, 1e-7, 1e-7], "groups": [8000.0]},
}


def test_everything_that_the_rows_name_exists():
    assert agent_proofs.problems(ROWS) == []


def test_the_page_has_every_row():
    rows = agent_proofs.table_rows("agent_proofs.md", "| what must hold")
    assert [row["what must hold"] for row in rows] == [row.promise for row in ROWS]


@pytest.mark.parametrize(
    ("wrong", "problem"),
    [
        ({"tests": ("tests/algo/test_kl.py::test_nothing",)}, "test_nothing does not exist"),
        ({"tests": ("tests/algo/test_none.py",)}, "test_none.py does not exist"),
        ({"mistakes": ("the KL is red",)}, "there is no mistake 'the KL is red'"),
        ({}, "no test of it is to notice 'KL is a bonus in the reward'"),
        ({"pages": ("none.md",)}, "docs/none.md does not exist"),
        ({"figures": (Saved("schedules", "{nothing}"),)}, "has the fields of '{nothing}'"),
        ({"figures": (Cell("kills.md", "run", "walk", "{kills}"),)}, "docs/kills.md has no row 'walk'"),
        ({"figures": (Cell("kills.md", "run", "stream", "{lives}"),)}, "lives"),
        ({"figures": (Count("kills.md", "walk", "kills", "", "{0}"),)}, "begins with the columns 'walk'"),
    ],
)
def test_a_row_that_names_what_does_not_exist_is_a_problem(wrong, problem):
    right = {} if not wrong else {"mistakes": ()}
    assert problem in "\n".join(agent_proofs.problems([replace(ROW, **right | wrong)]))


def test_a_row_shows_the_newest_run_of_exactly_its_tests(monkeypatch):
    failed = RUN | {"passed": False, "counts": RUN["counts"] | {"failures": 1}}
    other = RUN | {"tests": ["tests/algo/test_kl.py"], "commit": "of-others"}
    monkeypatch.setattr(agent_proofs, "saved_lines", lambda name: [other, RUN, failed])
    page = agent_proofs.page([ROW])
    line = "| 1 | It holds. | error: 1e-07 to 2.35e-07; groups: 8,000 | passed: 3 tests, 2 s, 2026-01-02, 1234abcd | "
    assert line in page and "of-others" not in page
    monkeypatch.setattr(agent_proofs, "saved_lines", lambda name: [other])
    assert "| 1 | It holds. |  | not run |" in agent_proofs.page([ROW])
    assert agent_proofs.outcome(failed) == "FAILED: 3 tests, 1 failure, 2 s, 2026-01-02, 1234abcd"


def test_a_mistake_that_no_test_noticed_stands_out():
    assert agent_proofs.state(None) == " (NOT MADE YET)" and agent_proofs.state("SURVIVED") == " (SURVIVED)"
    assert agent_proofs.state("`tests/algo/test_kl.py::test_estimators_by_hand`") == ""


def test_counts_and_cells_of_tables_are_figures():
    killed = agent_proofs.figure_of(Cell("kills.md", "run", "ppo, stream", "{kills} kills"))
    assert killed.split()[1] == "kills" and int(killed.split()[0]) > 0 and "](kills.md))" in killed
    stopped = agent_proofs.figure_of(Count("reward_attacks.md", "attack | root", "no jail", "stopped", "{0} of {1}"))
    first, _, second = stopped.split(" (")[0].split()
    assert 0 < int(first) < int(second)
