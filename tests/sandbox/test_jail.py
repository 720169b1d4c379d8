"""What a machine offers to a jail is tried; where namespaces are refused, only a flag allows the weaker one."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import venv
from pathlib import Path

import pytest

from rlhf_suite.sandbox import jail
from rlhf_suite.sandbox.jail import choose_jail, jail_options, offer, trial_problem

# In a process whose kernel refuses namespaces, as it does in most containers.
WITHOUT_NAMESPACES = """
import json
import os
import sys
import tempfile
import venv
from pathlib import Path
sys.path.append({here!r})
from jail_attacks import show_python_to_others
from rlhf_suite.composition.arguments import parse
from rlhf_suite.preflight.inspections.inspect_runs import inspect
from rlhf_suite.preflight.jobs import preflight
from rlhf_suite.sandbox import kernel, seccomp
from rlhf_suite.sandbox.jail import offer
from rlhf_suite.sandbox.process import SandboxError
from rlhf_suite.sandbox.programs import Limits, run_python
if os.geteuid() == 0:
    show_python_to_others()  # root needs a Python that others may read
kernel.prctl(kernel.NO_NEW_PRIVILEGES, 1)
seccomp.install(seccomp.no_namespaces())
try:
    run_python("print(1)", "", Limits(30.0, 256))
    refusal = None
except SandboxError as error:
    refusal = str(error)
found = offer()
ran = run_python("print(1)", "", Limits(30.0, 256, allow_weaker=True)).stdout if found.options else None
line = "task=check_reward data.dataset=builtin:reverse data.output_key=label data.label_key=label".split()
line.append("reward.rule=code")
flag = "reward.rules.code_allow_weaker=true"
problems = [
    [[each.key, each.what, each.fix] for each in inspect(preflight(parse(line + more)).runs, Path("none"))]
    for more in ([], [flag])
]
line = "task=ppo demo=ppo reward.rule=exact_match".split()
sums = "agent.sources={{sums: {{kind: python, datasets: [default]}}}}"
elsewhere = "agent.python_url=http://localhost:8080"
python, weaker = "agent.kind=python", "agent.python_allow_weaker=true"
problems += [
    [each.key for each in inspect(preflight(parse(line + more)).runs, Path("none"))]
    for more in ([python], [sums], [python, weaker], [sums, elsewhere])
]
print(json.dumps([found.options and found.options.bare, found.missing, refusal, ran, problems]))
"""


@pytest.fixture(scope="module")
def without_namespaces():
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_NAMESPACES.format(here=str(Path(__file__).parent))],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.notices("code in the jail may open sockets", "sandbox/seccomp.py", '"socket": (41, 198), ', "")
@pytest.mark.notices(
    "what a jail does not stop is not looked at",
    "sandbox/jail.py",
    "if got_through else None",
    "if not got_through else None",
)
def test_this_machine_offers_a_full_jail():
    assert offer().options is not None and not offer().is_weaker, offer().missing
    assert not choose_jail(False, "").bare


@pytest.mark.notices(
    "a weaker jail needs no flag", "sandbox/jail.py", "(allow_weaker or not offered.is_weaker)", "True"
)
def test_where_namespaces_are_refused_the_reason_is_named_and_nothing_runs_without_the_flag(without_namespaces):
    bare, missing, refusal, ran, _ = without_namespaces
    assert missing[0].startswith("namespaces: ") and missing[0].endswith("unshare: Operation not permitted")
    assert bare, missing
    assert refusal.startswith("this machine offers only a weaker jail for untrusted code: namespaces: ")
    assert "reward.rules.code_allow_weaker=true" in refusal
    assert ran == "1\n"


def test_a_run_of_programs_is_refused_before_it_starts_where_only_the_flag_allows_it(without_namespaces):
    _, missing, *_, (without_flag, with_flag, *_) = without_namespaces
    ((key, what, fix),) = without_flag
    assert missing[0] in what and with_flag == []
    assert key == "reward.rules.code_allow_weaker" and fix.startswith("write reward.rules.code_allow_weaker=true")


def test_agents_that_run_python_here_need_a_jail_and_those_that_run_it_elsewhere_do_not(without_namespaces):
    *_, (_, _, python, of_some_rows, with_flag, elsewhere) = without_namespaces
    assert python == of_some_rows == ["agent.python_allow_weaker"]
    assert "agent.python_allow_weaker" not in with_flag + elsewhere


def test_a_jail_in_which_something_forbidden_works_is_not_used(monkeypatch):
    monkeypatch.setattr(jail, "FORBIDDEN", {"counting": "len([])", "opening a socket": "socket.socket()"})
    assert trial_problem(jail_options(bare=False)) == "not refused: counting"


def test_a_jail_in_which_nothing_runs_is_not_used(monkeypatch):
    monkeypatch.setattr(jail, "PROBE", "1 / 0 # {outside} {forbidden}")
    assert trial_problem(jail_options(bare=False)).startswith("code does not run in it: Traceback")


def test_an_interpreter_below_tmp_gets_the_same_jail():
    """The folder of programs stands in for /tmp, where an environment may be too."""
    code = "from rlhf_suite.sandbox.jail import offer; print(offer().options and offer().options.bare)"
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        venv.create(folder, symlinks=True)
        source = Path(jail.__file__).parents[2]
        found = subprocess.run(
            [f"{folder}/bin/python", "-c", code],
            env={"PYTHONPATH": str(source)},
            capture_output=True,
            text=True,
            check=False,
        )
    options = offer().options
    assert found.stdout.strip() == str(options and options.bare), found.stderr
