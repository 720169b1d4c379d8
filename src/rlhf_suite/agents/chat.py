"""Chat completions of OpenAI: how requests are read, and how they are answered."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from rlhf_suite.agents.base import Schema
from rlhf_suite.agents.request import (
    MODEL,
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
)
from rlhf_suite.data.messages import Message

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant", "tool": "tool"}
OF_SERVICES = ("service_tier", "safety_identifier", "prompt_cache_key", "prompt_cache_retention")
FIELDS = Fields(
    read=("messages", "tools", "tool_choice", "max_tokens", "max_completion_tokens", "stop", "stream", "logprobs"),
    unused=("model", "user", "metadata", "store", "stream_options", "reasoning_effort", "verbosity", *OF_SERVICES),
    neutral={
        "presence_penalty": (0,),
        "frequency_penalty": (0,),
        "logit_bias": ({},),
        "response_format": ({"type": "text"},),
        "top_logprobs": (0,),
        "parallel_tool_calls": (True,),
    },
    forms={"n": (1,)},
)


def read(body: Mapping[str, Any], wishes: Wishes) -> ChatRequest:
    """Return what a request asks for.

    Raises:
        Refused: the request asks for what cannot be, with the reason.
    """
    given = wishes.read_fields(body, FIELDS)
    may_call = wishes.allow_calls(given.get("tool_choice", "auto"))
    options = given.get("stream_options")
    return ChatRequest(
        messages_of(given.get("messages")),
        check_tools([tool(item) for item in list_of(given.get("tools", []), "tools")]),
        may_call,
        limit_of(given, "max_completion_tokens", "max_tokens"),
        stop_of(given.get("stop"), "stop"),
        given.get("stream") is True,
        isinstance(options, dict) and options.get("include_usage") is True,
        given.get("logprobs") is True,
        overridden=tuple(wishes.collected),
    )


def tool(given: Any) -> Schema:
    """Return a tool of a request."""
    function = given.get("function") if isinstance(given, dict) and given.get("type") == "function" else None
    if not (isinstance(function, dict) and isinstance(function.get("name"), str)):
        raise Refused('each of tools must be {"type": "function", "function": {"name": ..., ...}}')
    return dict(given)


def messages_of(given: Any) -> tuple[Message, ...]:
    """Return the messages of a request; the last one is not of the model."""
    listed = given if isinstance(given, list) else []
    return check_conversation([message_of(item, place) for place, item in enumerate(listed)], "messages")


def message_of(given: Any, place: int) -> Message:
    """Return a message of a request, which stands at `place`."""
    where = f"messages[{place}]"
    role = ROLES.get(str(given.get("role"))) if isinstance(given, dict) else None
    if role is None:
        raise Refused(f"{where} must have the role system, developer, user, assistant or tool")
    content = text_of(given.get("content"), where)
    if role == "tool":
        return tool_answer(given.get("tool_call_id"), content)
    message: Message = {"role": role, "content": content}
    if role == "assistant" and given.get("tool_calls"):
        calls = list_of(given["tool_calls"], f"{where}.tool_calls")
        message["tool_calls"] = [of_assistant(item, where) for item in calls]
    return message


def of_assistant(given: Any, where: str) -> dict[str, Any]:
    """Return a call of a tool in a message of the assistant."""
    function = given.get("function") if isinstance(given, dict) else None
    if not isinstance(function, dict):
        raise Refused(f"{where}: each of tool_calls must have a function with a name")
    return call_of(given.get("id"), function.get("name"), function.get("arguments", {}), where)


def answer(completion: Completion, request: ChatRequest, tokenizer: PreTrainedTokenizerBase) -> dict[str, Any]:
    """Return the answer to a request that does not stream."""
    choice = {
        "index": 0,
        "message": wire(completion.message),
        "finish_reason": completion.finish_reason,
        "logprobs": token_log_probs(completion, tokenizer) if request.log_probs else None,
        "token_ids": list(completion.ids),
    }
    return frame(completion, "chat.completion") | {
        "choices": [choice],
        "usage": usage(completion),
        "prompt_token_ids": list(completion.prompt_ids),
    }


def stream(completion: Completion, request: ChatRequest, tokenizer: PreTrainedTokenizerBase) -> Iterator[bytes]:
    """Yield the events of a stream: the whole turn, its end, and its number of tokens if that is asked for."""
    whole = answer(completion, request, tokenizer)
    choice = whole["choices"][0]
    calls = choice["message"].pop("tool_calls", [])
    delta = choice.pop("message")
    if calls:
        delta["tool_calls"] = [{"index": place, **call} for place, call in enumerate(calls)]
    first = {**choice, "delta": delta, "finish_reason": None}
    last = {"index": 0, "delta": {}, "finish_reason": completion.finish_reason, "logprobs": None}
    chunk = frame(completion, "chat.completion.chunk")
    yield event(chunk | {"choices": [first], "prompt_token_ids": whole["prompt_token_ids"]})
    yield event(chunk | {"choices": [last]})
    if request.counts_usage:
        yield event(chunk | {"choices": [], "usage": whole["usage"]})
    yield b"data: [DONE]\n\n"


def frame(completion: Completion, kind: str) -> dict[str, Any]:
    """Return what every answer begins with."""
    return {"id": f"chatcmpl-{completion.id}", "object": kind, "created": int(time.time()), "model": MODEL}


def usage(completion: Completion) -> dict[str, int]:
    """Return the numbers of tokens."""
    prompt, written = len(completion.prompt_ids), len(completion.ids)
    return {"prompt_tokens": prompt, "completion_tokens": written, "total_tokens": prompt + written}


def token_log_probs(completion: Completion, tokenizer: PreTrainedTokenizerBase) -> dict[str, Any]:
    """Return the log-prob of each token, with its text."""
    texts = [str(tokenizer.decode([token])) for token in completion.ids]
    return {
        "content": [
            {"token": text, "logprob": float(log_prob), "bytes": [*text.encode()], "top_logprobs": []}
            for text, log_prob in zip(texts, completion.log_probs, strict=True)
        ]
    }


def wire(message: Message) -> dict[str, Any]:
    """Return a message of the model as it is sent: the arguments of calls are JSON texts."""
    calls = [
        call | {"function": call["function"] | {"arguments": json.dumps(call["function"]["arguments"])}}
        for call in message.get("tool_calls", ())
    ]
    return {**message, "tool_calls": calls} if calls else dict(message)


def refuse(error: Refused) -> dict[str, Any]:
    """Return the body of an error, in the form that clients of OpenAI expect."""
    kind = "invalid_request_error"
    return {"error": {"message": error.message, "type": kind, "param": None, "code": error.code}}


CHAT = Api(read, answer, stream, refuse)
