"""Tools beside an environment: who answers which call of a turn."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from scripted import Scripted, chat_task, open_session, run

from rlhf_suite.agents.build import make_agent, roles
from rlhf_suite.config.declarations.agent import AgentConfig, agents_of
from rlhf_suite.rewards.base import RewardFailure, Scored

pytestmark = pytest.mark.stack

SERVER = f"mcp:{sys.executable} {Path(__file__).with_name('mcp_server.py')}"
GAME = '''
import time

from clock import Clock
from rlhf_suite.agents.base import Start, Step
from rlhf_suite.agents.tools import answer_to


def double(number: int) -> int:
    """Double a number.

    Args:
        number: it
    """
    return 2 * number


OPEN = {"type": "function", "function": {"name": "open", "description": "Open.", "parameters": {"type": "object"}}}


class Environment:
    def reset(self, task):
        return Start(tools=(OPEN,))

    def step(self, turn):
        if turn.calls:
            return Step(tuple(answer_to(call, f"opened {len(turn.calls)}") for call in turn.calls), reward=0.25)
        if turn.content == "hang":
            Clock.latest.forward(601.0)
            time.sleep(1000)
        return Step(reward=1.0, done=True) if turn.content == "right" else Step.say("no", reward=0.0)

    def last_step(self):
        return Step(reward=0.125)

    def close(self):
        pass


tools = [double]
'''


def called(name: str, **arguments) -> str:
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


def play(tokenizer, file: Path, replies, text: str = GAME, **flags):
    file.write_text(text)
    config = AgentConfig(**({"kind": "environment", "timeout_s": 3600.0} | flags))
    chosen = agents_of(config, str(file))[0]
    session = open_session(tokenizer, Scripted(tokenizer, replies), chat_task(tokenizer), parser="hermes")
    episode = run(make_agent(chosen, must_score=True).run, chat_task(tokenizer), session)
    said = tokenizer.decode(episode.ledgers[0].ids).split("<|im_start|>")
    return episode, [text.partition("<|im_end|>")[0] for text in said if text.startswith(("tool\n", "user\n"))][1:]


@pytest.mark.notices(
    "an environment gets the calls of the tools beside it",
    "agents/tools.py",
    "if call.name not in self.own)",
    "if call.name is None)",
)
@pytest.mark.notices(
    "an environment beside tools does not get the calls of its own",
    "agents/tools.py",
    "        if not rest:\n            return answered",
    "        if rest:\n            return answered",
)
def test_calls_of_the_tools_are_answered_by_them_and_all_else_by_the_environment(tokenizer, tmp_path):
    replies = [
        called("double", number=4),
        "wrong",
        called("double", number=5) + called("open") + called("none"),
        called("add", a=1, b=2),
        "right",
    ]
    episode, said = play(tokenizer, tmp_path / "game.py", replies, tools=[SERVER])
    known = "Error: there is no tool 'none'; tools: add, fail, double"
    assert said == ["tool\n8", "user\nno", "tool\n10", f"tool\n{known}", "tool\nopened 1", "tool\n3"]
    assert episode.outcome == Scored(1.125, 1.375, {"agent/tool_errors": 1.0})
    assert (episode.ending, episode.extra["agent/calls"]) == ("finished", 5.0)


def test_an_environment_beside_tools_has_its_limit_for_each_answer(tokenizer, tmp_path, clock):
    outcome = play(tokenizer, tmp_path / "game.py", ["hang"], tool_timeout_s=600.0)[0].outcome
    assert outcome == RewardFailure("step of the environment took longer than agent.tool_timeout_s=600", "timeout")


def test_a_tool_that_the_environment_has_too_ends_the_episode(tokenizer, tmp_path):
    outcome = play(tokenizer, tmp_path / "game.py", [], GAME.replace("double", "open"))[0].outcome
    assert isinstance(outcome, RewardFailure) and "two tools are called open" in outcome.reason


def test_the_tools_of_such_a_file_are_those_of_an_agent_of_tools_too(tokenizer, tmp_path):
    episode, said = play(tokenizer, tmp_path / "game.py", [called("double", number=4), "bye"], kind="tools")
    assert said == ["tool\n8"] and isinstance(episode.outcome, RewardFailure)
    file = str(tmp_path / "game.py")
    kinds = {kind: roles(agents_of(AgentConfig(kind=kind), file)[0]) for kind in ("environment", "tools")}
    assert kinds == {"environment": ["tool", "user"], "tools": ["tool"]}
