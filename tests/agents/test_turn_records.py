"""Records of turns: their times, their calls, and what was answered, each turn in exactly one ledger."""

from __future__ import annotations

import json

import pytest
from endpoint_episodes import CALL, TOOL, Model, ask
from scripted import Scripted, chat_task, ends_of_turns, open_session, run

from rlhf_suite.agents import turn_records
from rlhf_suite.agents.environment import EnvironmentAgent
from rlhf_suite.agents.tools import FunctionTools, ToolEnvironment
from rlhf_suite.data.trajectory import CallRecord

pytestmark = pytest.mark.stack


@pytest.fixture
def now(monkeypatch):
    """The time in seconds, which stands still unless a test changes it."""
    time = [100.0]
    monkeypatch.setattr(turn_records, "monotonic", lambda: time[0])
    return time


@pytest.mark.notices(
    "the time of a tool counts as time of sampling",
    "agents/turn_records.py",
    "record = TurnRecord(len(ledger.ids), now - asked, calls=calls)",
    "record = TurnRecord(len(ledger.ids), now - 100.0, calls=calls)",
)
@pytest.mark.notices(
    "a call has the answer of another one",
    "agents/turn_records.py",
    "call.answer = texts.get(number)",
    "call.answer = next(iter(texts.values()), None)",
)
def test_a_turn_has_the_seconds_of_its_sampling_and_of_its_answer_and_its_calls(tokenizer, now):
    def add(a: int, b: int) -> int:
        """Add two numbers.

        Args:
            a: the first
            b: the second
        """
        now[0] += 0.25
        return a + b

    class Slow(Scripted):
        async def generate(self, request):
            now[0] += 2.0
            return await super().generate(request)

    call = '<tool_call>{"name": "add", "arguments": %s}</tool_call>'
    replies = [call % '{"a": 1, "b": 2}' + call % '{"a": 3, "b": 4}', call % '{"a": 1, "c": "ö"}', "done"]
    task = chat_task(tokenizer)
    session = open_session(tokenizer, Slow(tokenizer, replies), task, parser="hermes")
    agent = EnvironmentAgent(lambda: ToolEnvironment([FunctionTools([add])], 60.0), 6, 3600.0)
    (ledger,) = run(agent.run, task, session).ledgers
    first, second, last = ledger.turn_records
    assert [record.end for record in ledger.turn_records] == ends_of_turns(ledger)
    assert [(record.sampling_s, record.answer_s) for record in ledger.turn_records] == [(2, 0.5), (2, 0), (2, 0)]
    assert first.calls == [CallRecord("add", '{"a": 1, "b": 2}', None, "3"), CallRecord("add", '{"a": 3, "b": 4}', None, "7")]  # fmt: skip  # noqa: E501
    (wrong,) = second.calls
    assert json.loads(wrong.arguments) == {"a": 1, "c": "ö"} and wrong.answer.startswith("Error: TypeError")
    assert last.calls == []


def test_what_a_program_answers_to_a_call_is_found_by_its_id(play, tokenizer, now):
    def run_agent(task, base_url, api_key):
        message = ask(base_url, api_key, task.messages, tools=[TOOL]).json()["choices"][0]["message"]
        now[0] += 1.5
        (call,) = message["tool_calls"]
        answer = {"role": "tool", "tool_call_id": call["id"], "content": "three"}
        ask(base_url, api_key, [*task.messages, message, answer], tools=[TOOL])
        return 1.0

    _, (ledger,) = play(run_agent, Model(tokenizer, lambda prompt: "so" if "three" in prompt else CALL))
    called, said = ledger.turn_records
    assert called.calls == [CallRecord("add", '{"a": 1, "b": 2}', None, "three")] and called.answer_s == 1.5
    assert said.calls == [] and said.answer_s == 0


def test_a_turn_that_is_not_trained_on_has_no_record(play, tokenizer):
    """`play` compares the records of each ledger with its turns: here one of three turns is forgotten."""

    def run_agent(task, base_url, api_key):
        first = ask(base_url, api_key, task.messages).json()["choices"][0]["message"]
        ask(base_url, api_key, task.messages)
        ask(base_url, api_key, [*task.messages, first, {"role": "user", "content": "on"}])
        return 1.0

    _, ledgers = play(run_agent, Model(tokenizer, lambda prompt: f"answer {prompt.count('user')}"))
    assert sum(len(ledger.turn_records) for ledger in ledgers) == 2
