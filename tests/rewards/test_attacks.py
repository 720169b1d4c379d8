"""What programs of the model and reward files try against a run: each costs its row, none the run."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.stack

BENCHMARK = Path(__file__).parents[2] / "benchmarks" / "reward_attacks.py"


@pytest.fixture(scope="module")
def benchmark():
    spec = importlib.util.spec_from_file_location("reward_attacks", BENCHMARK)
    module = importlib.util.module_from_spec(spec)
    sys.modules["reward_attacks"] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def attacks(benchmark):
    """What came of every attack of the benchmark, by who tried it and its name."""
    found = {(result.by, result.attack): result for result in benchmark.results(2.5, 1.5)}
    names = {("program", name) for name in (*benchmark.PROGRAMS, *benchmark.FORGERIES)}
    names |= {("file", name) for name in benchmark.FILES}
    assert set(found) == names
    return found


def test_no_attack_stops_the_run_leaves_a_process_or_touches_a_file(attacks):
    for result in attacks.values():
        assert (result.run_goes_on, result.left_behind, result.outside_untouched) == (True, 0, True), result


def test_no_attack_earns_a_reward(attacks):
    for (by, _), result in attacks.items():
        assert result.outcome.startswith("scored 0 (" if by == "program" else ("error: ", "timeout: ")), result


@pytest.mark.parametrize(
    ("by", "attack", "reason"),
    [
        ("program", "infinite loop", "it ran longer than it may"),
        ("program", "10 GB allocation", "MemoryError"),
        ("program", "segmentation fault", "SIGSEGV"),
        ("program", "flood of output", "it printed too much"),
        ("program", "huge file", "File too large"),
        ("program", "sys.exit(0) before the tests", "ended early (exit code 0)"),
        ("program", "read keys in the environment", "KeyError"),
        ("program", "raise its own limits", "not allowed to raise maximum limit"),
        ("file", "infinite loop", "timeout: "),
        ("file", "segmentation fault", "SIGSEGV"),
        ("file", "not a number", "reward is nan"),
    ],
)
def test_an_attack_ends_by_the_limit_that_is_meant_for_it(attacks, by, attack, reason):
    assert reason in attacks[by, attack].outcome


def test_network_files_disk_and_processes_are_out_of_reach(attacks):
    assert "Operation not permitted" in attacks["program", "socket"].outcome
    for attack in ("write outside its folder", "delete files in HOME", "read another user's file"):
        assert "No such file or directory" in attacks["program", attack].outcome
    assert "No space left" in attacks["program", "many files"].outcome
    for attack in ("kill the reward process", "kill every process"):
        assert "No such process" in attacks["program", attack].outcome
