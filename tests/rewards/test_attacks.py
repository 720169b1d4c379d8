"""What programs of the model and reward files try against a run: each costs its row, none the run."""

from __future__ import annotations

import os
import platform

import pytest
from reward_attacks import FILES, FORGERIES, MEMORY_MB, OTHERS_S, PROGRAMS, results

from attack_page import Section
from rlhf_suite.sandbox import kernel
from rlhf_suite.sandbox.jail import offer

pytestmark = pytest.mark.stack

PROGRAM_S, FILE_S = 3.0, 2.0  # what programs and files that hang may take
SECTION = Section(
    "# What reward code can do to a run",
    f"Programs: `reward.rule=code`, {PROGRAM_S:g} s and {MEMORY_MB} MiB; files: `reward.timeout_s={FILE_S:g}`, or "
    f"{OTHERS_S:g} s for those that end by themselves. Each attack is between two right answers of one batch; the "
    "seconds are those of all three. The last column counts processes that outlive the attack (for a file, its reward "
    "process).",
    ("by", "attack", "what limits it", "outcome", "seconds", "run goes on", "left behind"),
    """Not stopped:

- A program can pass a wrong test if the test calls a method of an object of the program: `assert f("x").is_valid()`, or
  `assert f("x").startswith("ab")` with an object that has such a method. Compare values: `assert f("x")[:2] == "ab"`.
- A reward file is code of the user. It has the user's files, network, keys and processes. A process that it starts in a
  new session outlives it, and their number is not limited. The suite promises that a file that hangs, crashes, prints
  without end or returns nonsense only loses its rows and does not end the run.
- In the weaker jail without namespaces (`reward.rules.code_allow_weaker=true`) a program can find out which paths
  exist, and may write more than 64 MiB to its folder for a tenth of a second.""",
)


@pytest.fixture(scope="module")
def attacks(section):
    """What came of every attack, by who tried it and its name."""
    section.text = f"{features()}. {section.text}"
    found = {(result.by, result.attack): result for result in results(PROGRAM_S, FILE_S)}
    names = {("program", name) for name in (*PROGRAMS, *FORGERIES)} | {("file", name) for name in FILES}
    assert set(found) == names
    for one in found.values():
        goes_on = "yes" if one.run_goes_on and one.outside_untouched else "NO"
        section.add(one.by, one.attack, one.limited, one.outcome, f"{one.seconds:g}", goes_on, one.left_behind)
    return found


def features() -> str:
    """Return what of the kernel the sandbox uses in this run."""
    options = offer().options
    spaces = "WITHOUT a jail" if options is None else "WITHOUT namespaces" if options.bare else "with namespaces"
    return (
        f"Linux {platform.release()}, as {'root' if os.geteuid() == 0 else 'an ordinary user'}, {spaces}, "
        f"Landlock {kernel.landlock_version()} and seccomp"
    )


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
