"""Texts that hold a whole dialogue, its turns marked at the start of a line: `Human: ...`, `Assistant: ...`."""

from __future__ import annotations

import re
from collections.abc import Sequence

from rlhf_suite.data.messages import Message
from rlhf_suite.data.row import Row, RowError

ROLES = ("user", "assistant")


def marks(text: str, markers: Sequence[str], row: Row) -> list[re.Match[str]]:
    """Where the turns of a text begin, the first at its beginning; group 1 is the marker."""
    names = "|".join(map(re.escape, markers))
    found = list(re.finditer(rf"(?:\A|\n)\s*({names})", text))
    if not found or found[0].start() > 0:
        raise RowError(row.where, "a dialogue does not begin with one of data.turn_markers")
    return found


def messages_in(text: str, markers: Sequence[str], row: Row) -> list[Message]:
    """The turns of a dialogue as messages. `markers`: what begins a user's turn, and an assistant's."""
    found = marks(text, markers, row)
    ends = [mark.start() for mark in found[1:]] + [len(text)]
    return [
        {"role": ROLES[markers.index(mark[1])], "content": text[mark.end() : end].strip()}
        for mark, end in zip(found, ends, strict=True)
    ]


def last_answer(text: str, markers: Sequence[str], row: Row) -> tuple[str, str]:
    """A dialogue, as it is written, up to and with the marker of its last turn, and that turn."""
    last = marks(text, markers, row)[-1]
    if last[1] != markers[1]:
        raise RowError(row.where, f"the last turn of a dialogue does not begin with {markers[1]!r}")
    prompt, answer = text[: last.end()], text[last.end() :].rstrip()
    if not answer.strip():
        raise RowError(row.where, "the response is empty")
    return prompt, answer
