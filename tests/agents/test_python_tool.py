"""Python in fences and as a tool: what runs, what the model sees of it, and when it ends. The sessions are jailed."""

from __future__ import annotations

import json

import pytest
from scripted import Scripted, chat_task, open_session, run

from rlhf_suite.agents.environment import EnvironmentAgent
from rlhf_suite.agents.python_tool import FenceAgent, PythonEnvironment, make_jailed
from rlhf_suite.data.trajectory import ENVIRONMENT

pytestmark = pytest.mark.stack


@pytest.fixture(scope="module")
def sessions():
    return make_jailed(512, True)


class Fenced(Scripted):
    """Ends where a stop string is complete, as an engine does; the rest of the text is the next reply."""

    left = ""

    async def generate(self, request):
        text = self.left or next(self.replies)
        ends = [text.index(stop) + len(stop) for stop in request.sampling.stop if stop in text]
        end = min(ends, default=len(text))
        self.left = text[end:]
        self.replies, rest = iter([text[:end]]), self.replies
        try:
            return await super().generate(request)
        finally:
            self.replies = rest


def fenced(tokenizer, replies, sessions, max_turns: int = 4, **limits):
    policy = Fenced(tokenizer, replies)
    session = open_session(tokenizer, policy, chat_task(tokenizer), **limits)
    agent = FenceAgent(lambda: PythonEnvironment(sessions, 20.0), max_turns, 100.0)
    return run(agent.run, chat_task(tokenizer), session), policy


def test_code_in_fences_runs_and_names_persist(tokenizer, sessions):
    replies = ["Let me see.\n```python\nx = 6\nprint(x)\n```", "\nNow\n```python\nx * 7\n```", "\nIt is 42."]
    episode, policy = fenced(tokenizer, replies, sessions)
    (ledger,) = episode.ledgers
    assert tokenizer.decode(ledger.ids).partition("assistant\n")[2] == (
        "Let me see.\n```python\nx = 6\nprint(x)\n```\n```output\n6\n```\n"
        "\nNow\n```python\nx * 7\n```\n```output\n42\n```\n\nIt is 42.<|im_end|>"
    )
    assert tokenizer.decode(ledger.ids[ledger.owner == ENVIRONMENT]) == "\n```output\n6\n```\n\n```output\n42\n```\n"
    assert episode.ending == "finished" and episode.outcome is None and len(ledger.turns) == 3
    assert episode.extra["agent/python_calls"] == 2.0 and episode.extra["agent/python_errors"] == 0.0
    stops = [request.sampling.stop for request in policy.asked]
    assert stops == [("```python",), ("```",), ("```python",), ("```",), ("```python",)]


def test_after_the_last_call_a_fence_does_not_end_the_turn(tokenizer, sessions):
    replies = ["```python\n1\n```", "```python\n2\n``` so it is", "never"]
    episode, policy = fenced(tokenizer, replies, sessions, max_turns=2)
    assert policy.asked[-1].sampling.stop == () and episode.ending == "finished"
    assert tokenizer.decode(episode.ledgers[0].ids).endswith("```python\n2\n``` so it is<|im_end|>")


def test_an_episode_without_code_counts_no_calls(tokenizer, sessions):
    episode, _ = fenced(tokenizer, ["It is 42."], sessions)
    assert episode.extra["agent/python_calls"] == 0.0 and episode.ending == "finished"


@pytest.mark.notices(
    "a block of code that is not closed runs",
    "agents/python_tool.py",
    "if rest.is_cut or not closed:",
    "if rest.is_cut:",
)
def test_a_block_that_is_not_closed_does_not_run(tokenizer, sessions):
    for reply, ending in ((("```python\nprint(1)", "length"), "cut"), ("```python\nprint(1)", "finished")):
        text, finish = reply if isinstance(reply, tuple) else (reply, "stop")
        policy = Scripted(tokenizer, [("```python", "stop"), (text.removeprefix("```python"), finish)])
        session = open_session(tokenizer, policy, chat_task(tokenizer))
        agent = FenceAgent(lambda: PythonEnvironment(sessions, 20.0), 4, 100.0)
        episode = run(agent.run, chat_task(tokenizer), session)
        assert episode.ending == ending and "output" not in tokenizer.decode(episode.ledgers[0].ids)


def test_long_output_is_cut_and_its_fence_is_whole(tokenizer, sessions):
    episode, _ = fenced(tokenizer, ["```python\nprint('a ' * 999)\n```", "ok"], sessions, max_feedback_tokens=20)
    output = tokenizer.decode(episode.ledgers[0].ids).partition("```output\n")[2]
    assert output.endswith("[...]\n```\nok<|im_end|>") and len(output) < 80


def call(code: object) -> str:
    return f"<tool_call>{json.dumps({'name': 'python', 'arguments': {'code': code}})}</tool_call>"


def test_code_in_tool_calls(tokenizer, sessions):
    replies = [call("x = 2\nprint('x')\nx"), call("x / 0") + call(3), call("pass"), "done"]
    session = open_session(tokenizer, Scripted(tokenizer, replies), chat_task(tokenizer), parser="hermes")
    agent = EnvironmentAgent(lambda: PythonEnvironment(sessions, 20.0), 9, 100.0)
    episode = run(agent.run, chat_task(tokenizer), session)
    said = [text.partition("<|im_end|>")[0] for text in tokenizer.decode(episode.ledgers[0].ids).split("tool\n")[1:]]
    assert said[0] == "x\n2" and said[1].endswith("ZeroDivisionError: division by zero")
    assert said[2].startswith("Error: there is one tool") and said[3] == "(no output)"
    assert episode.extra["agent/python_errors"] == 1.0 and episode.extra["agent/turns"] == 4.0
