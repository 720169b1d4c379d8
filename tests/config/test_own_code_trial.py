"""What a run's user wrote is tried in a process of its own before anything starts: files that cannot be imported, tools
that cannot be described, servers of tools that die."""

from __future__ import annotations

import os
import shlex
import signal
import sys
from contextlib import suppress
from pathlib import Path

import pytest

from rlhf_suite.cli.app import main
from rlhf_suite.composition.arguments import parse
from rlhf_suite.config.check.problems import Problem
from rlhf_suite.polling import poll_until
from rlhf_suite.preflight.inspections import own_code
from rlhf_suite.preflight.inspections.own_code import own_code_can_be_used
from rlhf_suite.preflight.jobs import preflight

pytestmark = pytest.mark.stack  # it starts processes

TEMPLATE = Path(__file__).parents[2] / "experiments" / "agents" / "tools.jinja"
CHAT = f"data.apply_chat_template=true data.tokenizer_chat_template={TEMPLATE}"
AGENT, FILE = f"task=ppo demo=ppo {CHAT} agent.kind=", "train.agent_func_path=mine.py"
WHERE = {
    "estimator": ("task=ppo demo=ppo algo.advantage.estimator=mine.py:mine", "algo.advantage.estimator"),
    "teacher": ("task=ppo demo=ppo algo.distill.coef=1 teacher.kind=mine.py:mine", "teacher.kind"),
    "filter": ("task=ppo demo=ppo algo.group_filter=mine.py:mine", "algo.group_filter"),
    "rule": ("task=ppo demo=ppo reward.rule=mine.py:mine", "reward.rule"),
    "reward": ("task=ppo demo=ppo reward.rule=null reward.remote_url=mine.py", "reward.remote_url"),
    "rows": ("task=sft demo=sft data.row_format=mine.py:mine", "data.row_format"),
    "environment": (f"{AGENT}environment {FILE} reward.rule=null", "train.agent_func_path"),
    "tools": (f"{AGENT}tools {FILE}", "train.agent_func_path"),
    "endpoint": (f"{AGENT}endpoint {FILE} reward.rule=null algo.advantage.estimator=rloo", "train.agent_func_path"),
}
DEFINES = {
    "estimator": "def mine(inputs, config): raise ValueError",
    "teacher": "def mine(setup): raise ValueError",
    "filter": "def mine(group): ...",
    "rule": "def mine(row, config): ...",
    "reward": "def reward_func(queries, prompts, labels): ...",
    "rows": "def mine(row): ...",
    "environment": "class Environment:\n    def reset(self, task): ...\n    def step(self, turn): ...",
    "tools": 'def add(a: int) -> int:\n    """Add.\n\n    Args:\n        a: a number.\n    """\ntools = [add]',
    "endpoint": "def run_agent(task, base_url, api_key): ...",
}
GAME = "class Game:\n    def reset(self, **row): ...\n    def guess(self, n: int) -> str:\n        {doc}\n"
DOC = '"""Guess.\n\n        Args:\n            n: a number.\n        """'


@pytest.fixture
def tried(tmp_path, monkeypatch):
    """Tries the file mine.py with this text for a command line, and returns the problems of that."""
    monkeypatch.chdir(tmp_path)

    def tried(line: str, text: str) -> list[Problem]:
        Path("mine.py").write_text(text)
        found = preflight(parse(shlex.split(line)))
        assert found.problems == []
        return [*own_code_can_be_used(found.runs[0], tmp_path)]

    return tried


@pytest.mark.parametrize("part", WHERE)
def test_a_file_that_imports_what_is_not_there_is_named_with_its_line(tried, part):
    line, key = WHERE[part]
    assert tried(line, DEFINES[part]) == []
    (problem,) = {*tried(line, f"import os\nimport nowhere_to_be_found\n{DEFINES[part]}")}
    assert problem.key == key
    assert "mine.py" in problem.what and problem.what.endswith(
        "importing it raised ModuleNotFoundError: No module named 'nowhere_to_be_found' (mine.py:2)"
    )
    assert problem.fix.startswith("install nowhere_to_be_found")


def test_a_mistake_in_a_module_beside_the_file_is_named_with_its_own_line(tried):
    Path("helper.py").write_text("x = 1\nfrom os import no_such_name\n")
    line, _ = WHERE["environment"]
    (problem,) = tried(line, f"import helper\n{DEFINES['environment']}")
    assert "cannot import name 'no_such_name'" in problem.what and problem.what.endswith("(helper.py:2)")


@pytest.mark.notices(
    "a file that ends the process of the trial counts as one that can be imported",
    "preflight/inspections/own_code.py",
    "        if len(entries) < len(pieces):\n",
    "        if False:\n",
)
@pytest.mark.notices(
    "a file that ends its process while it is imported gets no remedy",
    "python_source.py",
    "    elif isinstance(error, SystemExit):\n",
    "    elif isinstance(error, SystemExit) and False:\n",
)
@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("import argparse\nargparse.ArgumentParser().parse_args(['--what'])", "importing it raised SystemExit: 2"),
        ("import os\nprint('my last words', flush=True)\nos._exit(3)", "(exit code 3); it last said: my last words"),
        ("import os\nos.kill(os.getpid(), 11)", "importing it ended the process (SIGSEGV)"),
    ],
    ids=("parser", "exit", "crash"),
)
def test_a_file_that_ends_the_process_is_found(tried, text, what):
    line, _ = WHERE["environment"]
    (problem,) = tried(line, f"{text}\n{DEFINES['environment']}")
    assert what in problem.what
    assert ("must not end the process" in problem.fix) == ("SystemExit" in what)


BARE = (
    "class Environment:\n    def __init__(self, n): ...\n    def reset(self, task): ...\n    def step(self, turn): ..."
)
WITH = "class Environment:\n    {roles}\n    def reset(self, task): ...\n    def step(self, {role}): ..."
DERIVED = "class Base:\n    def reset(self, task): ...\nclass Environment(Base): ..."


@pytest.mark.notices(
    "the methods of an environment of TRL are described by the first episode",
    "preflight/trial.py",
    "vars(exported).items() if export.form == TRL else ():",
    "():",
)
@pytest.mark.notices(
    "a class that needs arguments is found by the first episode",
    "python_source.py",
    "    except TypeError as error:\n        return str(error)\n",
    "    except TypeError:\n        return None\n",
)
@pytest.mark.parametrize(
    ("text", "what"),
    [
        (BARE, "is made without arguments, and missing a required argument: 'n'"),
        (DERIVED, "Environment (environment) has no step"),
        (WITH.format(roles="", role=""), "Environment (environment).step cannot be called as step(turn)"),
        (
            WITH.format(roles='roles = ("a", "b")', role="role, turn, more"),
            "Environment (environment).step cannot be called as step(role, turn), because its class has roles a, b",
        ),
        (WITH.format(roles='roles = "solver"', role="role, turn"), "roles is 'solver', not a tuple of names"),
        (WITH.format(roles='roles = ("a", "a")', role="role, turn"), "roles has 'a' twice"),
        (GAME.format(doc="pass"), "mine.py:3: the tool guess cannot be described to the model"),
    ],
    ids=("arguments", "derived", "turn", "role", "no tuple", "twice", "trl"),
)
def test_a_class_that_no_episode_could_use_is_found(tried, text, what):
    line, _ = WHERE["environment"]
    (problem,) = tried(line, text)
    assert what in problem.what
    assert tried(line, GAME.format(doc=DOC)) == []


def test_a_class_that_is_made_in_a_coroutine_is_fine(tried):
    line, _ = WHERE["environment"]
    assert tried(line, f"{DEFINES['environment']}\n    async def __init__(self, *arguments, **named): ...") == []


CREDIT = "from rlhf_suite.algo.advantage import Credit\ndef mine(inputs, config):\n    "


@pytest.mark.notices(
    "what an own estimator returns is seen in the first step",
    "preflight/trial.py",
    "    if kind in CALLS:\n",
    "    if False:\n",
)
@pytest.mark.notices(
    "an error with the numbers of a trial refuses a run",
    "preflight/trial.py",
    "        except Exception:\n            return\n",
    "        except ZeroDivisionError:\n            return\n",
)
@pytest.mark.parametrize(
    ("body", "shown"),
    [
        ("return inputs.kl_penalty", "mine returned Tensor of shape [5]"),
        ("return Credit(inputs.rewards, inputs.rewards)", "mine returned Credit (advantages: Tensor of shape [2]"),
        ("return Credit(inputs.values, inputs.kl_penalty + inputs.entropies)", None),
        ("raise ValueError('only with the numbers of a run')", None),
    ],
    ids=("tensor", "shapes", "fits", "raises"),
)
def test_what_an_estimator_returns_is_seen_before_the_run(tried, body, shown):
    line, key = WHERE["estimator"]
    problems = tried(line, CREDIT + body)
    assert [(each.key, shown in each.what) for each in problems] == ([(key, True)] if shown else [])
    assert all(each.fix.startswith("return Credit(advantages, returns)") for each in problems)


def test_a_tool_without_a_docstring_is_named_with_its_line(tried):
    line, key = WHERE["tools"]
    (problem,) = tried(line, "def add(a: int) -> int:\n    return a\ntools = [add]")
    assert problem.key == key and problem.fix.startswith("give it a docstring")
    assert "mine.py:1: the tool add cannot be described to the model" in problem.what


@pytest.mark.notices(
    "MCP servers start with the first episode",
    "preflight/inspections/own_code.py",
    "if has_part and (servers or",
    "if has_part and (",
)
def test_a_server_of_tools_that_dies_is_shown_with_what_it_said(tried):
    server = 'import sys\nprint("loading the tools", file=sys.stderr)\nimport nowhere_to_be_found\n'
    (problem,) = tried(f"{AGENT}tools 'agent.tools=[\"mcp:{sys.executable} mine.py\"]'", server)
    assert problem.key == "agent.tools" and f"{sys.executable} mine.py does not answer" in problem.what
    assert "loading the tools" in problem.what and "No module named 'nowhere_to_be_found'" in problem.what


def test_a_tool_that_a_server_has_too_is_found(tried):
    server = Path(__file__).parents[1] / "agents" / "mcp_server.py"
    line = f"{AGENT}tools 'agent.tools=[\"mcp:{sys.executable} {server}\"]'"
    assert tried(line, "") == []
    (problem,) = tried(f"{line} {FILE}", DEFINES["tools"])
    assert "two tools are called add" in problem.what


@pytest.mark.notices(
    "a file whose import takes long is refused",
    "preflight/inspections/own_code.py",
    "    elif piece.must_end:\n",
    "    else:\n",
)
def test_a_file_that_takes_long_is_left_to_the_run(tried, monkeypatch):
    monkeypatch.setattr(own_code, "IMPORT_S", 2.0)
    line, _ = WHERE["environment"]
    assert tried(line, f"import threading\nthreading.Event().wait()\n{DEFINES['environment']}") == []


def is_gone(number: int) -> bool:
    """Whether a process ends within a minute. It is ended here if not."""
    line = Path(f"/proc/{number}/cmdline")
    try:
        return poll_until(lambda: not line.exists() or not line.read_bytes(), 60, 0.1)
    finally:
        with suppress(ProcessLookupError):
            os.kill(number, signal.SIGKILL)


@pytest.mark.proof  # it waits for two limits of ten seconds
@pytest.mark.notices(
    "a server of tools that never answers outlives the trial",
    "preflight/inspections/own_code.py",
    "                child.kill()\n",
    "                pass\n",
)
def test_a_server_that_never_answers_is_a_problem_and_is_ended(tried, monkeypatch):
    monkeypatch.setattr(own_code, "IMPORT_S", 10.0)
    monkeypatch.setattr(own_code, "SERVER_S", 10.0)
    server = "import os, sys, threading\nopen('server', 'a').write(f'{os.getpid()}\\n')\nthreading.Event().wait()\n"
    (problem,) = tried(f"{AGENT}tools 'agent.tools=[\"mcp:{sys.executable} mine.py\"]'", server)
    assert problem.key == "agent.tools" and "asking its servers took longer than 20 s" in problem.what
    started = Path("server").read_text().split() if Path("server").exists() else []  # a busy machine may not come to it
    assert all(is_gone(int(number)) for number in started)


@pytest.mark.notices(
    "what a file of the user starts outlives the trial",
    "preflight/inspections/own_code.py",
    "        os.killpg(process.pid, signal.SIGKILL)\n",
    "        os.kill(process.pid, signal.SIGKILL)\n",
)
def test_nothing_that_a_file_starts_outlives_the_trial(tried):
    line, _ = WHERE["environment"]
    starts = "import subprocess\nchild = subprocess.Popen(['sleep', 'infinity'])\n"
    says = "with open('child', 'w') as file:\n    file.write(str(child.pid))\n"
    assert tried(line, starts + says + DEFINES["environment"]) == []
    assert is_gone(int(Path("child").read_text()))


@pytest.mark.notices(
    "user code is run where the machine of the run is not known yet",
    "preflight/inspections/own_code.py",
    "    if folder is None or not is_first_node():\n",
    "    if not is_first_node():\n",
)
def test_nothing_is_tried_where_the_run_does_not_start(tried):
    line, _ = WHERE["reward"]
    assert tried(line, "import nowhere_to_be_found\ndef reward_func(queries, prompts, labels): ...") != []
    (run,) = preflight(parse(shlex.split(line))).runs
    assert [*own_code_can_be_used(run, None)] == []


@pytest.mark.notices(
    "the user's code is imported by the run alone",
    "preflight/inspections/inspect_runs.py",
    "problems = problems or distinct(problem for run in asked for problem in own_code_can_be_used(run, folder))",
    "problems = problems",
)
def test_variables_that_hydra_sets_are_there_in_the_trial(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    Path("mine.py").write_text(f"import os\nos.environ['OF_THE_JOB']\nimport nowhere_to_be_found\n{DEFINES['reward']}")
    monkeypatch.setenv("OF_THE_JOB", "")  # so that it is gone afterwards
    monkeypatch.delenv("OF_THE_JOB")
    words = [*shlex.split(WHERE["reward"][0]), "+hydra.job.env_set.OF_THE_JOB=yes", "run_dir=here"]
    assert main(words) == 2
    said = capsys.readouterr().err
    assert "1 problem" in said and "No module named 'nowhere_to_be_found'" in said
