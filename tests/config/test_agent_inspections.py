"""What the preflight finds in files and servers of agents, before anything starts."""

from __future__ import annotations

import socket

import pytest

from rlhf_suite.config.declarations.runs import Run
from rlhf_suite.preflight.inspections.agents import agent_files_fit, commands_can_run, environment_server_answers

TRL = """
class Game:
    def reset(self, target, label, seed=0):
        pass
    def guess(self, n: int) -> str:
        pass
"""
SHOWS = """
class AgentInstance:
    async def step(self, states):
        return {"rewards": 0.0, "environment_images": [1], "environment_feedback": "<image>", "done": True}
"""


def problems(tmp_path, text: str, **data):
    file = tmp_path / "mine.py"
    file.write_text(text)
    run = Run.of("ppo")
    run.agent.kind, run.train.agent_func_path = "environment", str(file)
    for name, value in data.items():
        setattr(run.data, name, value)
    return [(each.key, each.what.replace(str(file), "mine.py"), each.fix) for each in agent_files_fit(run, None)]


@pytest.mark.notices(
    "a class without its methods is found by the first episode",
    "preflight/inspections/agents.py",
    "if missing and not node.bases:",
    "if False:",
)
@pytest.mark.parametrize(
    ("text", "missing"),
    [
        ("class Environment:\n    async def step(self, turn): ...", "has no reset"),
        ("class Environment: ...", "has no reset and no step"),
        ("class AgentInstance:\n    async def reset(self, states): ...", "has no step"),
    ],
)
def test_a_class_without_its_methods_is_named_with_its_line(tmp_path, text, missing):
    ((key, what, _),) = problems(tmp_path, text)
    assert key == "train.agent_func_path" and what.startswith("mine.py:1: class ") and what.endswith(missing)


def test_a_class_that_has_its_methods_from_another_one_is_not_refused(tmp_path):
    assert problems(tmp_path, "from other import Base\nclass Environment(Base): ...") == []


@pytest.mark.notices(
    "a column that reset needs is not looked for",
    "preflight/inspections/agents.py",
    "        if absent:\n",
    "        if False:\n",
)
def test_a_column_that_reset_needs_and_no_row_passes_is_named(tmp_path):
    ((_, what, fix),) = problems(tmp_path, TRL)
    assert what == "mine.py:3: reset takes target, which no row passes" and fix == "add data.reward_columns=[target]"
    assert problems(tmp_path, TRL, reward_columns=["target"]) == []


@pytest.mark.notices(
    "images for a policy that reads text are found by the first episode",
    "preflight/inspections/agents.py",
    "shows and run.data.image_key is None",
    "shows and run.data.image_key == 0",
)
def test_images_of_an_environment_need_a_policy_that_sees(tmp_path):
    ((key, what, _),) = problems(tmp_path, SHOWS)
    assert key == "data.image_key" and "mine.py:2: class AgentInstance (openrlhf) answers with images" in what
    assert problems(tmp_path, SHOWS, image_key="image") == []


@pytest.mark.notices(
    "the server of an environment is not asked before the run",
    "preflight/inspections/agents.py",
    "unreachable([first_hop(url)], CONNECT_S).items()",
    "{}.items()",
)
def test_a_server_that_is_not_there_is_found_before_the_run(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        run = Run.of("ppo")
        run.agent.kind, run.agent.server_url = "environment", f"ws://127.0.0.1:{port}/ws"
        assert [*environment_server_answers(run, tmp_path)] == []
    (problem,) = environment_server_answers(run, tmp_path)
    assert problem.key == "agent.server_url" and f"127.0.0.1:{port}" in problem.what
    assert [*environment_server_answers(run, None)] == []


@pytest.mark.parametrize(
    ("command", "said"),
    [
        ("sleep 1 && echo $AGENT_PROMPT", None),
        ("HOME=/x claude -p", None),
        ("$AGENT_START/program", None),
        ("if true; then echo", "the shell cannot read it"),
        ("  ", "it is empty"),
        ("no-such-program -p", "there is no program no-such-program"),
        ("agents/bin/python x.py", "would be searched in the folder of each episode"),
        ("/no/such/program", "there is no program /no/such/program"),
    ],
)
def test_a_command_that_cannot_run_is_found_before_the_run(tmp_path, command, said):
    for name in ("command", "score_command"):
        run = Run.of("ppo")
        setattr(run.agent, name, command)
        found = [*commands_can_run(run, tmp_path)]
        assert [problem.key for problem in found] == [f"agent.{name}"] * (said is not None)
        assert all(said in problem.what for problem in found)
    assert [*commands_can_run(run, None)] == []
