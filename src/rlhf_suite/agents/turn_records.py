"""Records of the turns of an episode: how long each took, which tools it called, and what these answered."""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import pairwise
from time import monotonic
from typing import Any, Protocol

from rlhf_suite.agents.base import Turn
from rlhf_suite.data.messages import Message
from rlhf_suite.data.trajectory import CallRecord, Trajectory, TurnRecord


class Written(Protocol):
    """A branch of a session, as records see it: `ends` has how many messages and tokens end with each turn."""

    ledger: Trajectory
    messages: list[Message]
    ends: list[tuple[int, int]]


class TurnRecorder:
    """Writes a record of each turn into the ledger that the turn was sampled into."""

    def __init__(self) -> None:
        self.unanswered: list[tuple[Trajectory, TurnRecord, float]] = []  # with the time at which each ended

    def ask(self, ledger: Trajectory) -> float:
        """Take note that a turn of a ledger is asked for, so that the one before it has been answered; return the time.

        A new ledger answers the turn that ended last.
        """
        now = monotonic()
        own = [entry for entry in self.unanswered if entry[0] is ledger] or self.unanswered[-1:]
        for entry in own:
            self.answer(entry, now)
        return now

    def answer(self, entry: tuple[Trajectory, TurnRecord, float], now: float) -> None:
        """Write how long the answer to a turn took."""
        _, record, ended = entry
        record.answer_s = now - ended
        self.unanswered = [other for other in self.unanswered if other is not entry]

    def write(self, ledger: Trajectory, turn: Turn, asked: float) -> None:
        """Write the record of a turn that is the end of a ledger."""
        now = monotonic()
        calls = [CallRecord(call.name, to_json(call.arguments), call.problem) for call in turn.calls]
        record = TurnRecord(len(ledger.ids), now - asked, calls=calls)
        ledger.turn_records.append(record)
        self.unanswered.append((ledger, record, now))

    def close(self, branches: Sequence[Written]) -> None:
        """Complete the times at the end of an episode, and write what tools answered in these branches."""
        now = monotonic()
        for entry in self.unanswered:
            self.answer(entry, now)
        for branch in branches:
            ends, said = [end for end, _ in branch.ends], branch.messages
            for record, (end, later) in zip(branch.ledger.turn_records, pairwise([*ends, len(said) + 1]), strict=True):
                add_answers(record, said[end - 1], said[end : later - 1])


def add_answers(record: TurnRecord, said: Message, answers: Sequence[Message]) -> None:
    """Write what tools answered to the calls in a message into the record of its turn. Calls that a program was sent as
    text, since they could not be read, have no answer."""
    of_tools = [message for message in answers if message["role"] == "tool"]
    texts = {message.get("tool_call_id"): text_of(message["content"]) for message in of_tools}
    ids = [call.get("id") for call in said.get("tool_calls") or ()]
    for call, number in zip(record.calls, ids, strict=False):
        call.answer = texts.get(number)


def text_of(content: Any) -> str:
    """Return the content of a message as a text; images in it are named."""
    if isinstance(content, str):
        return content
    return "".join(item.get("text", f"[{item.get('type')}]") for item in content)


def to_json(arguments: object) -> str:
    """Return the arguments of a call as JSON; what has no form in JSON is written as Python shows it."""
    return json.dumps(arguments, ensure_ascii=False, default=repr)
