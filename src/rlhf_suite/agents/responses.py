"""Responses of OpenAI: how requests are read, and how they are answered.

A conversation is a list of items here: reasoning, messages, calls and their outputs. Items of the model that follow
each other are one turn.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from rlhf_suite.agents.base import Schema
from rlhf_suite.agents.chat import OF_SERVICES, ROLES, refuse
from rlhf_suite.agents.request import (
    MODEL,
    WOULD_CHANGE,
    Api,
    ChatRequest,
    Completion,
    Fields,
    Refused,
    Wishes,
    call_of,
    check_conversation,
    check_tools,
    event,
    limit_of,
    list_of,
    text_of,
    tool_answer,
    tool_of,
)
from rlhf_suite.data.messages import Message

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

PREFIX = "resp_"  # of the names of answers, before `Completion.id`
JOINED = "{}__{}"  # the name under which the model sees a tool of a namespace
TEXTS = ("text", "input_text", "output_text", "summary_text", "reasoning_text", "refusal")
FIELDS = Fields(
    read=("input", "instructions", "tools", "tool_choice", "max_output_tokens", "stream", "previous_response_id"),
    unused=(
        *("model", "user", "metadata", "store", "include", "reasoning", "truncation", "stream_options", *OF_SERVICES),
        *("text", "client_metadata", "max_tool_calls", "prompt_cache_options"),
    ),
    neutral={"parallel_tool_calls": (True,), "top_logprobs": (0,), "background": (False,)},
    forms={"conversation": (), "prompt": ()},
)


def read(body: Mapping[str, Any], wishes: Wishes) -> ChatRequest:
    """Return what a request asks for.

    Raises:
        Refused: the request asks for what cannot be, with the reason.
    """
    given = wishes.read_fields(body, FIELDS)
    may_call = wishes.allow_calls(given.get("tool_choice", "auto"))
    text = given.get("text")
    form = text.get("format") if isinstance(text, dict) else None
    if isinstance(form, dict) and form.get("type", "text") != "text":
        wishes.add(f"text.format of type {form['type']!r}", WOULD_CHANGE, "Leave it out of the request")
    instructions = text_of(given.get("instructions"), "instructions")
    before: list[Message] = [{"role": "system", "content": instructions}] if instructions else []
    previous = given.get("previous_response_id")
    tools, namespaces = tools_of(given.get("tools", []), wishes)
    return ChatRequest(
        check_conversation([*before, *messages_of(given.get("input"))], "input"),
        check_tools(tools),
        may_call,
        limit_of(given, "max_output_tokens"),
        streams=given.get("stream") is True,
        previous=None if previous is None else str(previous).removeprefix(PREFIX),
        instructions=len(before),
        overridden=tuple(wishes.collected),
        namespaces=namespaces,
    )


def tools_of(given: Any, wishes: Wishes) -> tuple[list[Schema], dict[str, str]]:
    """Return the tools of a request, and the namespace of those that have one, by the name under which the model sees
    them. What is neither a function nor a namespace of functions is left out.

    Raises:
        Refused: a tool has no name, or the model would see two under the same one.
    """
    tools, namespaces = list[Schema](), dict[str, str]()
    for place, item in enumerate(list_of(given, "tools")):
        where = f"tools[{place}]"
        if not isinstance(item, dict):
            raise Refused(f"{where} must be an object with a type and a name")
        if item.get("type") != "namespace":
            tools += function_of(item, where, wishes)
            continue
        space, about = item.get("name"), item.get("description")
        if not isinstance(space, str) or not space:
            raise Refused(f"{where} must have a name")
        for inner, entry in enumerate(list_of(item.get("tools"), f"{where}.tools")):
            for tool in function_of(entry, f"{where}.tools[{inner}]", wishes, space, about):
                tools.append(tool)
                namespaces[tool["function"]["name"]] = space
    names = [tool["function"]["name"] for tool in tools]
    if twice := next((name for name in namespaces if names.count(name) > 1), None):
        joined = "a namespace and the name of its tool are joined with __"
        raise Refused(f"the model would see two tools of the name {twice!r}, since {joined}: rename one of them")
    return tools, namespaces


def function_of(item: Any, where: str, wishes: Wishes, space: str | None = None, about: Any = None) -> list[Schema]:
    """Return a tool of a request as the chat template shows it; nothing if it is not a function. `space`, `about`: name
    and description of its namespace."""
    if not isinstance(item, dict):
        raise Refused(f"{where} must be an object with a type and a name")
    if item.get("type") != "function":
        wish = f"{where} of type {item.get('type')!r}"
        wishes.add(wish, ": only functions can be called here", "Leave it out of the request")
        return []
    description = item.get("description")
    if about:
        description = "\n".join(str(text) for text in (about, description) if text)
    tool = tool_of(item.get("name"), description, item.get("parameters"), where)
    if space is not None:
        tool["function"]["name"] = JOINED.format(space, tool["function"]["name"])
    return [tool]


def messages_of(given: Any) -> list[Message]:
    """Return the messages that the items of a request say."""
    items = [{"role": "user", "content": given}] if isinstance(given, str) else list_of(given, "input")
    messages: list[Message] = []
    for place, item in enumerate(items):
        where = f"input[{place}]"
        if not isinstance(item, dict):
            raise Refused(f"{where} must be an object")
        kind = item.get("type", "message")
        if kind == "function_call_output":
            content = text_of(item.get("output"), where, TEXTS)
            messages.append(tool_answer(item.get("call_id"), content))
        elif kind == "message" and item.get("role") != "assistant":
            role = ROLES.get(str(item.get("role")))
            if role is None:
                raise Refused(f"{where} must have the role system, developer, user or assistant")
            messages.append({"role": role, "content": text_of(item.get("content"), where, TEXTS)})
        else:
            add_to_turn(messages, item, kind, where)
    return messages


def add_to_turn(messages: list[Message], item: Mapping[str, Any], kind: str, where: str) -> None:
    """Add an item of the model to its turn, which begins where the last message is not the model's."""
    if kind not in ("message", "function_call", "reasoning"):
        raise Refused(f"{where}: an item of type {kind!r} is not understood here")
    if not messages or messages[-1]["role"] != "assistant":
        messages.append({"role": "assistant", "content": ""})
    turn = messages[-1]
    if kind == "message":
        turn["content"] += text_of(item.get("content"), where, TEXTS)
    elif kind == "reasoning":
        thoughts = text_of(item.get("content") or item.get("summary"), where, TEXTS)
        turn["reasoning_content"] = turn.get("reasoning_content", "") + thoughts
    else:
        name = item.get("name")
        if item.get("namespace") is not None and isinstance(name, str):
            name = JOINED.format(item["namespace"], name)
        call = call_of(item.get("call_id"), name, item.get("arguments"), where)
        turn.setdefault("tool_calls", []).append(call)


def output_of(completion: Completion, namespaces: Mapping[str, str]) -> list[dict[str, Any]]:
    """Return the items of a turn. `namespaces` are those of the tools that have one."""
    message, number = completion.message, completion.id
    status = "incomplete" if completion.finish_reason == "length" else "completed"
    calls = message.get("tool_calls", ())
    items: list[dict[str, Any]] = []
    if thoughts := message.get("reasoning_content"):
        content = [{"type": "reasoning_text", "text": thoughts}]
        items.append({"type": "reasoning", "id": f"rs_{number}", "summary": [], "content": content, "status": status})
    if message["content"] or not calls:
        part = {"type": "output_text", "text": message["content"], "annotations": [], "logprobs": []}
        said = {"type": "message", "id": f"msg_{number}", "role": "assistant", "content": [part], "status": status}
        items.append(said)
    for place, call in enumerate(calls):
        called, arguments = call["function"]["name"], json.dumps(call["function"]["arguments"])
        name = {"name": called}
        if space := namespaces.get(called):
            name = {"name": called.removeprefix(JOINED.format(space, "")), "namespace": space}
        said = {"call_id": call["id"], **name, "arguments": arguments, "status": status}
        items.append({"type": "function_call", "id": f"fc_{number}_{place}", **said})
    return items


def answer(completion: Completion, request: ChatRequest, tokenizer: PreTrainedTokenizerBase) -> dict[str, Any]:
    """Return the answer to a request that does not stream."""
    is_cut = completion.finish_reason == "length"
    prompt, written = len(completion.prompt_ids), len(completion.ids)
    usage = {
        "input_tokens": prompt,
        "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
        "output_tokens": written,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": prompt + written,
    }
    return {
        "id": f"{PREFIX}{completion.id}",
        "object": "response",
        "created_at": int(time.time()),
        "status": "incomplete" if is_cut else "completed",
        "error": None,
        "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
        "instructions": None,
        "model": MODEL,
        "output": output_of(completion, request.namespaces),
        "parallel_tool_calls": True,
        "previous_response_id": None if request.previous is None else PREFIX + request.previous,
        "tool_choice": "auto" if request.may_call else "none",
        "tools": [],
        "usage": usage,
    }


def stream(completion: Completion, request: ChatRequest, tokenizer: PreTrainedTokenizerBase) -> Iterator[bytes]:
    """Yield the events of a stream: each item of the turn as a whole, and its end."""
    whole = answer(completion, request, tokenizer)
    begun = {**whole, "status": "in_progress", "output": [], "usage": None, "incomplete_details": None}
    events: list[dict[str, Any]] = [
        {"type": "response.created", "response": begun},
        {"type": "response.in_progress", "response": begun},
    ]
    for place, item in enumerate(whole["output"]):
        at: dict[str, Any] = {"output_index": place}
        empty: dict[str, Any] = {"arguments": ""} if item["type"] == "function_call" else {"content": []}
        events.append({"type": "response.output_item.added", **at, "item": item | empty | {"status": "in_progress"}})
        events += parts_of(item, at | {"item_id": item["id"]})
        events.append({"type": "response.output_item.done", **at, "item": item})
    events.append({"type": f"response.{whole['status']}", "response": whole})
    for number, data in enumerate(events):
        yield event(data | {"sequence_number": number}, str(data["type"]))


def parts_of(item: Mapping[str, Any], at: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the events between the beginning of an item and its end."""
    if item["type"] == "function_call":
        kind, arguments = "response.function_call_arguments", item["arguments"]
        done = {"type": f"{kind}.done", **at, "name": item["name"], "arguments": arguments}
        return [{"type": f"{kind}.delta", **at, "delta": arguments}, done]
    (part,) = item["content"]
    kind, inside = f"response.{part['type']}", {**at, "content_index": 0}
    log_probs: dict[str, Any] = {"logprobs": []} if part["type"] == "output_text" else {}
    return [
        {"type": "response.content_part.added", **inside, "part": part | {"text": ""}},
        {"type": f"{kind}.delta", **inside, "delta": part["text"], **log_probs},
        {"type": f"{kind}.done", **inside, "text": part["text"], **log_probs},
        {"type": "response.content_part.done", **inside, "part": part},
    ]


RESPONSES = Api(read, answer, stream, refuse)
