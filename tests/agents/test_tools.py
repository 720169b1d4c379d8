"""Tools: descriptions, answers, and errors, which are answers too."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import numpy as np
import pytest
from scripted import Scripted, chat_task, open_session, run

from clock import Clock
from rlhf_suite.agents.base import Task, ToolCall, Turn
from rlhf_suite.agents.build import make_episodes
from rlhf_suite.agents.environment import EnvironmentAgent
from rlhf_suite.agents.tools import FunctionTools, ToolEnvironment, schema_of
from rlhf_suite.config.check.agent_file import export_of
from rlhf_suite.config.declarations.runs import Run
from rlhf_suite.errors import UserError
from rlhf_suite.models.builtin import byte_tokenizer

pytestmark = pytest.mark.stack

CALLED = []


def add(a: int, b: int = 1) -> int:
    """Add two numbers.

    Args:
        a: the first
        b: the second
    """
    CALLED.append((a, b))
    return a + b


async def wait(seconds: float) -> str:
    """Wait.

    Args:
        seconds: how long
    """
    Clock.latest.forward(601.0)
    await asyncio.sleep(seconds)
    return "waited"


def call(name: str, **arguments) -> str:
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


def test_a_function_is_described_by_its_hints_and_its_docstring():
    assert schema_of(add) == {
        "type": "function",
        "function": {
            "name": "add",
            "description": "Add two numbers.",
            "parameters": {
                "type": "object",
                "properties": {
                    "a": {"type": "integer", "description": "the first"},
                    "b": {"type": "integer", "description": "the second"},
                },
                "required": ["a"],
            },
        },
    }


def test_a_function_without_a_description_is_refused():
    def bare(a: int) -> int:
        """Do something."""
        return a

    with pytest.raises(UserError, match=rf"{Path(__file__).name}:\d+: the tool bare .*below Args:"):
        schema_of(bare)


def play(tokenizer, replies, tools, timeout_s: float = 300.0):
    policy = Scripted(tokenizer, replies)
    session = open_session(tokenizer, policy, chat_task(tokenizer), parser="hermes", max_len=4000)
    agent = EnvironmentAgent(lambda: ToolEnvironment(tools, timeout_s), 6, 3600.0)
    episode = run(agent.run, chat_task(tokenizer), session)
    said = tokenizer.decode(episode.ledgers[0].ids).split("<|im_start|>tool\n")[1:]
    return episode, [text.partition("<|im_end|>")[0] for text in said]


def test_calls_are_answered_until_a_turn_has_none(tokenizer):
    replies = ["x" + call("add", a=1, b=2) + call("add", a=5), "it is " + call("add", a=0, b=0), "done"]
    episode, answers = play(tokenizer, replies, [FunctionTools([add])])
    assert answers == ["3", "6", "0"] and episode.ending == "finished" and episode.outcome is None
    counts = {name.removeprefix("agent/"): value for name, value in episode.extra.items()}
    wanted = {"turns": 3.0, "calls": 3.0, "malformed_calls": 0.0, "tool_errors": 0.0}
    assert counts == wanted


@pytest.mark.notices(
    "a call with a problem is executed",
    "agents/tools.py",
    "            if call.problem is not None:\n                raise ToolError(call.problem)\n",
    "",
)
def test_what_is_wrong_with_a_call_is_its_answer(tokenizer, clock):
    replies = [
        call("sub", a=1) + "<tool_call>{a}</tool_call>" + call("add", a=1, c=2) + call("wait", seconds=1000),
        "done",
    ]
    episode, answers = play(tokenizer, replies, [FunctionTools([add, wait])], timeout_s=600)
    assert answers[0] == "Error: there is no tool 'sub'; tools: add, wait"
    assert answers[1].startswith("Error: the call is not a JSON object")
    assert answers[2].startswith("Error: TypeError: ") and answers[3] == "Error: wait took longer than 600 s"
    assert (episode.extra["agent/tool_errors"], episode.extra["agent/malformed_calls"]) == (4.0, 1.0)


@pytest.mark.notices(
    "the last one of two tools with the same name answers all calls",
    "agents/tools.py",
    "if name in self.owners:",
    "if False:",
)
@pytest.mark.parametrize("tools", [[[add, add]], [[add], [wait, add]]])
def test_two_tools_of_one_name_end_the_episode_at_its_start(tokenizer, tools):
    CALLED.clear()
    episode, _ = play(tokenizer, [], [FunctionTools(functions) for functions in tools])
    assert episode.outcome.reason.endswith("two tools are called add, so a call does not say which: rename one of them")
    assert episode.ending == "failed" and CALLED == []


def test_a_call_of_a_turn_that_was_cut_off_is_not_executed(tokenizer):
    CALLED.clear()
    episode, _ = play(tokenizer, [(call("add", a=1), "length")], [FunctionTools([add])])
    assert episode.ending == "cut" and CALLED == []
    environment = ToolEnvironment([FunctionTools([add])], 300.0)
    run(environment.reset, chat_task(tokenizer))
    assert run(environment.answer, ToolCall("call00001", "add", {"a": 1}, "cut off")) == "Error: cut off"
    assert CALLED == []


def test_the_example_of_tools_can_be_described_and_its_template_goes_on():
    folder = Path(__file__).parents[2] / "experiments" / "agents"
    assert export_of(str(folder / "calculator" / "agent.py")).form == "tools"
    run_flags = Run.of("ppo")
    run_flags.agent.kind, run_flags.train.agent_func_path = "tools", str(folder / "calculator" / "agent.py")
    run_flags.data.apply_chat_template, run_flags.reward.rule = True, "exact_match"
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = (folder / "tools.jinja").read_text()
    episodes = make_episodes(run_flags, None, tokenizer, [tokenizer.eos_token_id], None)
    (tools,) = episodes.agent.make().tools
    assert tools.known[0]["function"]["name"] == "add"


@pytest.mark.notices(
    "all answers of a turn carry the id of one call",
    "agents/tools.py",
    "answers = [answer_to(call, await self.answer(call)) for call in turn.calls]",
    "answers = [answer_to(turn.calls[0], await self.answer(call)) for call in turn.calls]",
)
def test_each_answer_of_a_turn_has_the_id_of_its_call():
    environment = ToolEnvironment([FunctionTools([add])], 300.0)
    calls = (ToolCall("first", "add", {"a": 1}), ToolCall("second", "add", {"a": 5}))

    async def both():
        await environment.reset(Task((), ""))
        return await environment.step(Turn(np.zeros(1, np.int64), "", "", calls=calls))

    answers = run(both).messages
    assert [(each["tool_call_id"], each["content"]) for each in answers] == [("first", "2"), ("second", "6")]
