"""Columns of a row as chat messages: text, message lists, ShareGPT conversations, dialogues in one text, tool calls."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Sequence
from typing import Any

from rlhf_suite.data.row import Row, RowError, require_value

Message = dict[str, Any]
SET_IMAGES = "set data.image_key (docs/vision.md)"
UNNAMED = "calls of tools that no prompt names: data.tools_key=<column> gives the template their descriptions"

SPEAKERS = ("system", "developer", "user", "assistant")  # roles whose messages are text
PART = '{"type": "text", "text": "..."}'

# The values of "from" in ShareGPT conversations, and the role that each means.
SHAREGPT_ROLES = {
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "assistant": "assistant",
    "chatgpt": "assistant",
    "bot": "assistant",
    "model": "assistant",
    "system": "system",
    "tool": "tool",
    "observation": "tool",
    "function_response": "tool",
}


def messages_of(value: object, key: str, role: str, row: Row) -> list[Message]:
    """Return column `key` as messages. A text becomes one message of role `role`."""
    if isinstance(value, str):
        return [{"role": role, "content": not_blank(value, key, row)}]
    if not isinstance(value, list):
        raise RowError(row.where, f"column {key!r} is of type {type(value).__name__}, not text or a message list")
    if not value:
        raise RowError(row.where, f"column {key!r} is an empty list")
    return [message_of(item, key, row) for item in value]


def message_of(value: object, key: str, row: Row) -> Message:
    """Return one item of a message list as a message.

    Keys without a value are removed, since templates test whether a message has them; `content` stays, as None, in a
    message that only calls tools. Arguments of tool calls become objects, which templates expect.
    """
    if isinstance(value, dict) and "role" not in value and {"from", "value"} <= value.keys():
        value = sharegpt_message(value, key, row)
    if not isinstance(value, dict) or not isinstance(value.get("role"), str):
        raise RowError(row.where, f"column {key!r} has an item that is not a message: role and content are needed")
    check_content(value["role"], value.get("content"), key, row)
    if value.get("content") is not None and "tool_calls" not in value and None not in value.values():
        return value
    message = {name: item for name, item in value.items() if item is not None}
    calls = message.get("tool_calls")
    if calls is not None and not isinstance(calls, list):
        kind = type(calls).__name__
        raise RowError(row.where, f"column {key!r} has a message whose tool_calls are of type {kind}, not a list")
    if calls:
        message["tool_calls"] = [with_arguments(call, key, row) for call in calls]
        message.setdefault("content", None)
    elif "content" not in message:
        raise RowError(row.where, f"column {key!r} has an item that is not a message: role and content are needed")
    return message


def check_content(role: str, content: object, key: str, row: Row) -> None:
    """Raise RowError where the content of a message is neither text nor a list of parts, since most chat templates
    would write it as Python does (`nan`, `['a']`). Tools may answer any value of JSON."""
    is_missing = isinstance(content, float) and math.isnan(content)
    if content is None or isinstance(content, str) or (role not in SPEAKERS and not is_missing):
        return
    if not isinstance(content, list):
        problem = f"content is {'NaN' if is_missing else f'of type {type(content).__name__}'}"
        raise RowError(row.where, f"column {key!r} has a message whose {problem}, not text or a list of parts")
    other = next((part for part in content if not isinstance(part, dict)), None)
    if other is not None:
        problem = f"content has a part of type {type(other).__name__}"
        raise RowError(row.where, f"column {key!r} has a message whose {problem}, not an object such as {PART}")


def sharegpt_message(value: dict[str, Any], key: str, row: Row) -> Message:
    """Return an item of a ShareGPT conversation, {"from": "human", "value": "..."}, as a message."""
    speaker = value["from"]
    role = SHAREGPT_ROLES.get(speaker) if isinstance(speaker, str) else None
    if role is None:
        known = ", ".join(SHAREGPT_ROLES)
        raise RowError(row.where, f"column {key!r} has an item from {speaker!r}; known values are {known}")
    return {"role": role, "content": value["value"]}


def with_arguments(call: object, key: str, row: Row) -> object:
    """Return a tool call whose arguments are an object; arguments written as JSON text are parsed."""
    function = call.get("function", call) if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise RowError(row.where, f"column {key!r} has a tool call without the name of a function")
    arguments = function.get("arguments")
    if not isinstance(arguments, str):
        return call
    try:
        changed = {**function, "arguments": json.loads(arguments)}
    except (ValueError, RecursionError):
        raise RowError(row.where, f"column {key!r} has a tool call whose arguments are not JSON") from None
    return {**call, "function": changed} if isinstance(call, dict) and "function" in call else changed


def list_called_functions(message: Message) -> list[str]:
    """Return the names of the functions that a message calls."""
    calls = message.get("tool_calls") or []
    return [call.get("function", call)["name"] for call in calls]


def note_unnamed_calls(messages: Sequence[Message], tools: list[Any] | None) -> tuple[str, ...]:
    """Return a note on a conversation that calls functions which no prompt names."""
    return (UNNAMED,) if not tools and any(message.get("tool_calls") for message in messages) else ()


def tools_of(row: Row, tools_key: str | None) -> list[Any] | None:
    """Return the tool descriptions in column `tools_key`, a list or its JSON text; None if there are none, or no such
    column."""
    if tools_key is None or not row.values.get(tools_key):
        return None
    value = require_value(row, tools_key)
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError):
            raise RowError(row.where, f"column {tools_key!r} is not JSON") from None
    if not isinstance(value, list) or not all(isinstance(tool, dict) for tool in value):
        raise RowError(row.where, f"column {tools_key!r} is not a list of tools")
    return value or None


def check_response(message: Message, row: Row) -> None:
    """Raise RowError if a response has no text and calls no tool."""
    content = message["content"]
    if not message.get("tool_calls") and (not content or (isinstance(content, str) and not content.strip())):
        raise RowError(row.where, "the response is empty")


def not_blank(text: str, key: str, row: Row) -> str:
    """Return the text.

    Raises:
        RowError: the text is blank.
    """
    if not text.strip():
        raise RowError(row.where, f"column {key!r} is empty")
    return text


ROLES = ("user", "assistant")


def turn_starts(text: str, markers: Sequence[str], row: Row) -> list[re.Match[str]]:
    """Return the matches where the turns of a dialogue text begin, the first at its start. Group 1 is the marker."""
    names = "|".join(map(re.escape, markers))
    starts = list(re.finditer(rf"(?:\A|\n)\s*({names})", text))
    if not starts or starts[0].start() > 0:
        raise RowError(row.where, "a dialogue does not begin with one of data.turn_markers")
    return starts


def messages_in(text: str, markers: Sequence[str], row: Row) -> list[Message]:
    """Return the turns of a dialogue text as messages. `markers` are the beginnings of a user turn and of an assistant
    turn."""
    starts = turn_starts(text, markers, row)
    ends = [mark.start() for mark in starts[1:]] + [len(text)]
    return [
        {"role": ROLES[markers.index(mark[1])], "content": text[mark.end() : end].strip()}
        for mark, end in zip(starts, ends, strict=True)
    ]


def last_response(text: str, markers: Sequence[str], row: Row) -> tuple[str, str]:
    """Split a dialogue text into everything up to and including the marker of its last turn, and the
    text of that turn."""
    last = turn_starts(text, markers, row)[-1]
    if last[1] != markers[1]:
        raise RowError(row.where, f"the last turn of a dialogue does not begin with {markers[1]!r}")
    prompt, response = text[: last.end()], text[last.end() :].rstrip()
    if not response.strip():
        raise RowError(row.where, "the response is empty")
    return prompt, response


def add_text(messages: Sequence[Message], text: str) -> list[Message]:
    """Return messages with a text of the user after them: in the last one where that is the user's, since many chat
    templates refuse two of them."""
    if not messages or messages[-1]["role"] != "user":
        return [*messages, {"role": "user", "content": text}]
    content = messages[-1]["content"]
    whole = f"{content}\n\n{text}" if isinstance(content, str) else [*content, {"type": "text", "text": text}]
    return [*messages[:-1], {**messages[-1], "content": whole}]


def join_texts(message: Message) -> Message:
    """Return a message for a model that reads text alone: a list of texts in its content is one text.

    Raises:
        ValueError: the list has something else.
    """
    content = message.get("content")
    if not isinstance(content, list | tuple):
        return message
    if other := next((item["type"] for item in content if item["type"] != "text"), None):
        raise ValueError(f"a message has an item of type {other!r}, and the policy reads text: {SET_IMAGES}")
    return {**message, "content": "".join(str(item.get("text", "")) for item in content)}
