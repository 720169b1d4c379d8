"""Messages of Anthropic: how requests are read, and how they are answered.

A message of the user may hold answers of tools, which are messages of their own here. Thinking is the reasoning of a
turn; its signature says nothing, because nobody has to prove who thought it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from rlhf_suite.agents.base import Schema
from rlhf_suite.agents.request import (
    MODEL,
    TOO_LONG,
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
    stop_of,
    text_of,
    tool_answer,
    tool_of,
)
from rlhf_suite.data.messages import Message

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

SIGNATURE = "policy"
FIELDS = Fields(
    read=("system", "messages", "tools", "tool_choice", "max_tokens", "stop_sequences", "stream"),
    unused=(
        *("model", "metadata", "thinking", "output_config", "cache_control", "service_tier", "speed", "inference_geo"),
        *("context_management", "diagnostics", "user_profile_id", "workspace_id", "betas"),
    ),
    neutral={},
    forms={"container": ()},
)
STOPPED = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}
ERRORS = {401: "authentication_error", 404: "not_found_error", 413: "request_too_large", 503: "overloaded_error"}


def read(body: Mapping[str, Any], wishes: Wishes) -> ChatRequest:
    """Return what a request asks for.

    Raises:
        Refused: the request asks for what cannot be, with the reason.
    """
    given = wishes.read_fields(body, FIELDS)
    choice = given.get("tool_choice", {})
    may_call = wishes.allow_calls(choice.get("type", "auto") if isinstance(choice, dict) else choice)
    system = text_of(given.get("system"), "system")
    messages: list[Message] = [{"role": "system", "content": system}] if system else []
    for place, item in enumerate(list_of(given.get("messages"), "messages")):
        messages += messages_of(item, f"messages[{place}]")
    return ChatRequest(
        check_conversation(messages, "messages"),
        check_tools(tools_of(given.get("tools", []), wishes)),
        may_call,
        limit_of(given, "max_tokens"),
        stop_of(given.get("stop_sequences"), "stop_sequences"),
        given.get("stream") is True,
        overridden=tuple(wishes.collected),
    )


def tools_of(given: Any, wishes: Wishes) -> list[Schema]:
    """Return the tools of a request. Those that a service would run itself are left out."""
    tools = []
    for place, item in enumerate(list_of(given, "tools")):
        where = f"tools[{place}]"
        if not isinstance(item, dict):
            raise Refused(f"{where} must be an object with a name and an input_schema")
        if item.get("type", "custom") != "custom":
            wishes.add(f"{where} of type {item['type']!r}", ": nobody runs it here", "Leave it out of the request")
            continue
        tools.append(tool_of(item.get("name"), item.get("description"), item.get("input_schema"), where))
    return tools


def messages_of(given: Any, where: str) -> list[Message]:
    """Return the messages in one message of a request: the answers of tools, then what is said."""
    role = given.get("role") if isinstance(given, dict) else None
    if role not in ("user", "assistant", "system"):
        raise Refused(f"{where} must have the role user or assistant")
    content = given.get("content")
    blocks = [{"type": "text", "text": content}] if isinstance(content, str) else list_of(content, f"{where}.content")
    kinds: dict[str, list[Mapping[str, Any]]] = {}
    for block in blocks:
        kind = block.get("type") if isinstance(block, dict) else None
        if kind not in ("text", "thinking", "redacted_thinking", "tool_use", "tool_result"):
            raise Refused(f"{where}: a block of type {kind!r} is not understood here; there are texts and calls")
        kinds.setdefault(str(kind), []).append(block)
    answers = [
        tool_answer(block.get("tool_use_id"), text_of(block.get("content"), where))
        for block in kinds.get("tool_result", [])
    ]
    message: Message = {"role": role, "content": text_of(kinds.get("text"), where)}
    if role != "assistant":
        return [*answers, *([message] if message["content"] or not answers else [])]
    if thoughts := "".join(str(block.get("thinking", "")) for block in kinds.get("thinking", [])):
        message["reasoning_content"] = thoughts
    if calls := kinds.get("tool_use"):
        message["tool_calls"] = [call_of(call.get("id"), call.get("name"), call.get("input"), where) for call in calls]
    return [message]


def content_of(message: Message) -> list[dict[str, Any]]:
    """Return the blocks of a message of the model."""
    blocks: list[dict[str, Any]] = []
    calls = message.get("tool_calls", ())
    if thoughts := message.get("reasoning_content"):
        blocks.append({"type": "thinking", "thinking": thoughts, "signature": SIGNATURE})
    if message["content"] or not calls:
        blocks.append({"type": "text", "text": message["content"]})
    for call in calls:
        function = call["function"]
        blocks.append({"type": "tool_use", "id": call["id"], "name": function["name"], "input": function["arguments"]})
    return blocks


def answer(completion: Completion, request: ChatRequest, tokenizer: PreTrainedTokenizerBase) -> dict[str, Any]:
    """Return the answer to a request that does not stream."""
    return {
        "id": f"msg_{completion.id}",
        "type": "message",
        "role": "assistant",
        "model": MODEL,
        "content": content_of(completion.message),
        "stop_reason": STOPPED[completion.finish_reason] if completion.stop is None else "stop_sequence",
        "stop_sequence": completion.stop,
        "usage": {"input_tokens": len(completion.prompt_ids), "output_tokens": len(completion.ids)},
    }


def stream(completion: Completion, request: ChatRequest, tokenizer: PreTrainedTokenizerBase) -> Iterator[bytes]:
    """Yield the events of a stream: each block of the turn as a whole, and its end."""
    whole = answer(completion, request, tokenizer)
    blocks, ended = whole["content"], {name: whole[name] for name in ("stop_reason", "stop_sequence")}
    begun = {**whole, "content": [], "stop_reason": None, "stop_sequence": None}
    begun["usage"] = {**whole["usage"], "output_tokens": 0}
    yield event({"type": "message_start", "message": begun}, "message_start")
    for index, block in enumerate(blocks):
        empty, deltas = parts_of(block)
        at = {"index": index}
        yield event({"type": "content_block_start", **at, "content_block": empty}, "content_block_start")
        for delta in deltas:
            yield event({"type": "content_block_delta", **at, "delta": delta}, "content_block_delta")
        yield event({"type": "content_block_stop", **at}, "content_block_stop")
    yield event({"type": "message_delta", "delta": ended, "usage": whole["usage"]}, "message_delta")
    yield event({"type": "message_stop"}, "message_stop")


def parts_of(block: Mapping[str, Any]) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Return how a block begins in a stream, and what is added to it."""
    if block["type"] == "tool_use":
        return {**block, "input": {}}, [{"type": "input_json_delta", "partial_json": json.dumps(block["input"])}]
    if block["type"] == "thinking":
        deltas = [
            {"type": "thinking_delta", "thinking": block["thinking"]},
            {"type": "signature_delta", "signature": block["signature"]},
        ]
        return {**block, "thinking": "", "signature": ""}, deltas
    return {**block, "text": ""}, [{"type": "text_delta", "text": block["text"]}]


def refuse(error: Refused) -> dict[str, Any]:
    """Return the body of an error. Clients know a conversation that is too long by the first words of the message."""
    begin = "prompt is too long: " if error.code == TOO_LONG else ""
    kind = ERRORS.get(error.status, "invalid_request_error")
    return {"type": "error", "error": {"type": kind, "message": begin + error.message}}


MESSAGES = Api(read, answer, stream, refuse)
