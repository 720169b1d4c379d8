"""The words of OpenAI's chat completions: which requests are understood, and what is answered.

A request may not change how tokens are sampled, because the trainer knows the distribution of `rollout.*` alone. What
only cuts a turn (`max_tokens`, `stop`) or is part of the prompt (`tools`) is free.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rlhf_suite.agents.base import Schema, Turn
from rlhf_suite.agents.bridge import CALL_ID
from rlhf_suite.data.generation import SamplingSettings
from rlhf_suite.data.messages import Message

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

MODEL = "policy"  # its name in /v1/models; a request may name any
ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant", "tool": "tool"}
READ = ("messages", "tools", "tool_choice", "max_tokens", "max_completion_tokens", "stop", "stream", "logprobs")
MAX_TOOLS = 100_000  # characters of their JSON
OF_SERVICES = ("service_tier", "safety_identifier", "prompt_cache_key")  # these mean nothing here
UNUSED = ("model", "user", "metadata", "store", "stream_options", *OF_SERVICES)
# Fields that may only have the value with which they do nothing.
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "n": (1,),
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "logit_bias": ({},),
    "response_format": ({"type": "text"},),
    "top_logprobs": (0,),
    "parallel_tool_calls": (True,),
}


class Refused(Exception):
    """A request that is answered with an error. `code` is the word for it in the answer."""

    def __init__(self, message: str, status: int = 400, code: str = "invalid_request") -> None:
        super().__init__(message)
        self.message, self.status, self.code = message, status, code

    def body(self) -> dict[str, Any]:
        """Return the answer, in the form that clients of OpenAI expect."""
        return {"error": {"message": self.message, "type": "invalid_request_error", "param": None, "code": self.code}}


@dataclass(frozen=True)
class ChatRequest:
    """A request that is understood."""

    messages: tuple[Message, ...]
    tools: tuple[Schema, ...] = ()
    may_call: bool = True  # tool_choice is not none
    max_tokens: int | None = None
    stop: tuple[str, ...] | None = None  # None: rollout.stop
    streams: bool = False
    counts_usage: bool = False  # a stream ends with the number of tokens
    log_probs: bool = False


def read_request(body: Mapping[str, Any], sampling: SamplingSettings) -> ChatRequest:
    """Return what a request asks for. `sampling`: how the run samples.

    Raises:
        Refused: the request asks for what cannot be, with the reason.
    """
    given = {name: value for name, value in body.items() if value is not None}
    check_characters(given, "the request")
    check_sampling(given, sampling)
    choice = given.get("tool_choice", "auto")
    if choice not in ("auto", "none"):
        raise Refused(f"tool_choice={choice!r}: write auto or none; a turn cannot be forced into a call")
    stop = given.get("stop")
    stop = [stop] if isinstance(stop, str) else stop
    if stop is not None and not (isinstance(stop, list) and all(isinstance(text, str) and text for text in stop)):
        raise Refused("stop must be a text or a list of texts")
    options = given.get("stream_options")
    return ChatRequest(
        messages_of(given.get("messages")),
        tools_of(given.get("tools", [])),
        choice == "auto",
        limit_of(given),
        None if stop is None else tuple(stop),
        given.get("stream") is True,
        isinstance(options, dict) and options.get("include_usage") is True,
        given.get("logprobs") is True,
    )


def check_characters(given: object, where: str) -> None:
    """Raise Refused if a text in a JSON value cannot be encoded: no tokenizer and no engine takes it."""
    try:
        json.dumps(given, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        raise Refused(f"{where} holds half of a surrogate pair, which is not a character") from error
    except RecursionError as error:
        raise Refused(f"{where} is nested too deeply") from error


def check_sampling(given: Mapping[str, Any], sampling: SamplingSettings) -> None:
    """Raise Refused if a request asks for other tokens than the run samples."""
    own = {name: getattr(sampling, name) for name in ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")}
    for name, value in given.items():
        if name in own:
            if value != own[name] and not (name == "top_k" and {value, own[name]} <= {0, -1}):
                raise Refused(
                    f"{name}={value!r}: this run samples with {own[name]:g} (rollout.{name}; in evaluations "
                    f"eval.{name} where there is one). Leave {name} out of the request"
                )
        elif name in NEUTRAL:
            if value not in NEUTRAL[name]:
                reason = "would change how tokens are sampled, which the trainer could not know"
                raise Refused(f"{name}={value!r} {reason}. Leave {name} out of the request")
        elif name not in READ and name not in UNUSED:
            raise Refused(f"{name} is not supported here. Leave it out of the request")


def limit_of(given: Mapping[str, Any]) -> int | None:
    """Return the most tokens of the turn; None: as many as fit."""
    limit = given.get("max_completion_tokens", given.get("max_tokens"))
    if limit is None or (isinstance(limit, int) and not isinstance(limit, bool) and limit >= 1):
        return limit
    raise Refused(f"max_tokens={limit!r} must be a whole number above 0")


def tools_of(given: Any) -> tuple[Schema, ...]:
    """Return the tools of a request."""
    if not isinstance(given, list):
        raise Refused("tools must be a list")
    for tool in given:
        function = tool.get("function") if isinstance(tool, dict) and tool.get("type") == "function" else None
        if not (isinstance(function, dict) and isinstance(function.get("name"), str)):
            raise Refused('each of tools must be {"type": "function", "function": {"name": ..., ...}}')
    if (count := len(json.dumps(given))) > MAX_TOOLS:
        raise Refused(f"the tools have {count} characters of JSON, more than {MAX_TOOLS}")
    return tuple(given)


def messages_of(given: Any) -> tuple[Message, ...]:
    """Return the messages of a request; the last one is not of the model."""
    if not isinstance(given, list) or not given:
        raise Refused("messages must be a list with at least one message")
    names: dict[str, str] = {}  # of functions, by the ids of their calls
    messages = tuple(message_of(message, place, names) for place, message in enumerate(given))
    if messages[-1]["role"] == "assistant":
        raise Refused("the last message is of the assistant: a turn that is begun cannot be continued")
    return messages


def message_of(given: Any, place: int, names: dict[str, str]) -> Message:
    """Return a message of a request, which stands at `place`."""
    where = f"messages[{place}]"
    role = ROLES.get(str(given.get("role"))) if isinstance(given, dict) else None
    if role is None:
        raise Refused(f"{where} must have the role system, developer, user, assistant or tool")
    message: Message = {"role": role, "content": content_of(given.get("content"), where)}
    if role == "assistant" and given.get("tool_calls"):
        calls = given["tool_calls"]
        message["tool_calls"] = [call_of(item, where) for item in calls] if isinstance(calls, list) else []
        names.update({call["id"]: call["function"]["name"] for call in message["tool_calls"]})
    if role == "tool":
        identity = str(given.get("tool_call_id", ""))
        message |= {"tool_call_id": identity, "name": str(given.get("name") or names.get(identity, "tool"))}
    return message


def content_of(given: Any, where: str) -> str:
    """Return the text of a message: a text, nothing, or a list of texts."""
    parts = [] if given is None else [given] if isinstance(given, str) else given
    texts = (
        [part.get("text") if isinstance(part, dict) else part for part in parts] if isinstance(parts, list) else None
    )
    if texts is None or not all(isinstance(text, str) for text in texts):
        raise Refused(f"{where}: the content must be a text, or a list of parts with texts; images are not understood")
    return "".join(map(str, texts))


def call_of(given: Any, where: str) -> dict[str, Any]:
    """Return a call of a tool in a message of the assistant, its arguments as an object."""
    function = given.get("function") if isinstance(given, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise Refused(f"{where}: each of tool_calls must have a function with a name")
    arguments = function.get("arguments", {})
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments or "{}")
        except (ValueError, RecursionError):
            arguments = None
    if not isinstance(arguments, dict):
        raise Refused(f"{where}: the arguments of {function['name']} are not a JSON object")
    check_characters(arguments, where)
    function = {"name": function["name"], "arguments": arguments}
    return {"id": str(given.get("id", "")), "type": "function", "function": function}


@dataclass(frozen=True)
class Completion:
    """A turn, as a client gets it."""

    number: int  # of the turn in its episode
    message: Message  # the conversation goes on with it
    finish_reason: str  # stop, length or tool_calls
    prompt_ids: Sequence[int]
    ids: Sequence[int]
    log_probs: Sequence[float]

    def body(self, request: ChatRequest, tokenizer: PreTrainedTokenizerBase) -> dict[str, Any]:
        """Return the answer to a request that does not stream."""
        choice = {
            "index": 0,
            "message": wire(self.message),
            "finish_reason": self.finish_reason,
            "logprobs": self.token_log_probs(tokenizer) if request.log_probs else None,
            "token_ids": list(self.ids),
        }
        return self.frame("chat.completion") | {
            "choices": [choice],
            "usage": self.usage(),
            "prompt_token_ids": list(self.prompt_ids),
        }

    def chunks(self, request: ChatRequest, tokenizer: PreTrainedTokenizerBase) -> Iterator[bytes]:
        """Yield the events of a stream: the whole turn, its end, and its number of tokens if that is asked for."""
        whole = self.body(request, tokenizer)
        choice = whole["choices"][0]
        calls = choice["message"].pop("tool_calls", [])
        delta = choice.pop("message")
        if calls:
            delta["tool_calls"] = [{"index": place, **call} for place, call in enumerate(calls)]
        first = {**choice, "delta": delta, "finish_reason": None}
        last = {"index": 0, "delta": {}, "finish_reason": self.finish_reason, "logprobs": None}
        frame = self.frame("chat.completion.chunk")
        events = [
            frame | {"choices": [first], "prompt_token_ids": whole["prompt_token_ids"]},
            frame | {"choices": [last]},
        ]
        if request.counts_usage:
            events.append(frame | {"choices": [], "usage": whole["usage"]})
        yield from (f"data: {json.dumps(event)}\n\n".encode() for event in events)
        yield b"data: [DONE]\n\n"

    def frame(self, kind: str) -> dict[str, Any]:
        """Return what every answer begins with."""
        return {"id": f"chatcmpl-{self.number}", "object": kind, "created": int(time.time()), "model": MODEL}

    def usage(self) -> dict[str, int]:
        """Return the numbers of tokens."""
        prompt, written = len(self.prompt_ids), len(self.ids)
        return {"prompt_tokens": prompt, "completion_tokens": written, "total_tokens": prompt + written}

    def token_log_probs(self, tokenizer: PreTrainedTokenizerBase) -> dict[str, Any]:
        """Return the log-prob of each token, with its text."""
        texts = [str(tokenizer.decode([token])) for token in self.ids]
        return {
            "content": [
                {"token": text, "logprob": float(log_prob), "bytes": [*text.encode()], "top_logprobs": []}
                for text, log_prob in zip(texts, self.log_probs, strict=True)
            ]
        }


def wire(message: Message) -> dict[str, Any]:
    """Return a message of the model as it is sent: the arguments of calls are JSON texts."""
    calls = [
        call | {"function": call["function"] | {"arguments": json.dumps(call["function"]["arguments"])}}
        for call in message.get("tool_calls", ())
    ]
    return {**message, "tool_calls": calls} if calls else dict(message)


def message_to_send(turn: Turn, request: ChatRequest, stop: Sequence[str], count: int) -> Message:
    """Return a turn as the message that the client sees. Calls that cannot be read, or may not be made, are text.

    `stop`: strings that end a turn, which are not part of the message; `count`: calls of the episode so far, which
    number the ids of these.
    """
    if turn.calls and request.may_call and not any(call.problem for call in turn.calls):
        message = turn.message()
        for number, call in enumerate(message["tool_calls"], start=count + 1):
            call["id"] = CALL_ID.format(number)
        return message
    content = turn.text.strip() if turn.calls else turn.content
    for end in stop:
        content = content.partition(end)[0] if end in content else content
    message = {"role": "assistant", "content": content}
    return message | {"reasoning_content": turn.reasoning} if turn.reasoning and not turn.calls else message
