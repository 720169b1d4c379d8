"""What a program asks of the model and what it gets, in one form for all APIs of the endpoint.

Each API has a file that reads its requests into this form and writes answers of this form: `chat.py` (chat
completions), `messages.py` (Messages of Anthropic), `responses.py` (Responses of OpenAI).

How tokens are sampled is a matter of the run, because the trainer knows the distribution of `rollout.*` alone. What
only cuts a turn (the most tokens, strings that end it) or is part of the prompt (tools) is free.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from rlhf_suite.agents.base import Schema, Turn
from rlhf_suite.agents.bridge import CALL_ID
from rlhf_suite.data.generation import SamplingSettings
from rlhf_suite.data.messages import Message
from rlhf_suite.foreign_text import printable

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

MODEL = "policy"  # its name in /v1/models; a request may name any
MAX_TOOLS = 100_000  # characters of their JSON
SAMPLED_BY = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")  # of rollout
WOULD_CHANGE = " would change how tokens are sampled, which the trainer could not know"
TOO_LONG = "context_length_exceeded"


class Refused(Exception):
    """A request that is answered with an error. `code` is the word for it in the answers of OpenAI's APIs."""

    def __init__(self, message: str, status: int = 400, code: str = "invalid_request") -> None:
        super().__init__(message)
        self.message, self.status, self.code = message, status, code


@dataclass(frozen=True)
class ChatRequest:
    """A request that is understood."""

    messages: tuple[Message, ...]
    tools: tuple[Schema, ...] = ()
    may_call: bool = True  # tool_choice is not none
    max_tokens: int | None = None
    stop: tuple[str, ...] | None = None  # None: rollout.stop
    streams: bool = False
    counts_usage: bool = False  # a stream of chat completions ends with the number of tokens
    log_probs: bool = False
    previous: str | None = None  # name of the answer whose conversation goes on with `messages`
    instructions: int = 0  # how many of `messages` are instructions, which a later request does not inherit
    overridden: tuple[str, ...] = ()  # what the client asked of the sampling, which the run decides
    namespaces: Mapping[str, str] = field(default_factory=dict)  # of tools, by the name under which the model sees one


@dataclass(frozen=True)
class Completion:
    """A turn, as a client gets it."""

    number: int  # of the turn in its episode
    message: Message  # the conversation goes on with it
    finish_reason: str  # stop, length or tool_calls
    prompt_ids: Sequence[int]
    ids: Sequence[int]
    log_probs: Sequence[float]
    stop: str | None = None  # the string of the request that ended the turn

    @property
    def id(self) -> str:
        """The turn among those of its episode, which later requests may name."""
        return f"{self.number:06d}"


@dataclass(frozen=True)
class Api:
    """How requests of an API are read, and how they are answered."""

    read: Callable[[Mapping[str, Any], Wishes], ChatRequest]
    answer: Callable[[Completion, ChatRequest, PreTrainedTokenizerBase], dict[str, Any]]
    stream: Callable[[Completion, ChatRequest, PreTrainedTokenizerBase], Iterator[bytes]]
    refuse: Callable[[Refused], dict[str, Any]]  # the body of an error


@dataclass
class Wishes:
    """What requests may ask of the sampling: nothing, because it is that of the run. Where `overrides` (agent.sampling)
    such wishes are collected and have no effect; otherwise they are refused."""

    sampling: SamplingSettings
    overrides: bool = False
    collected: list[str] = field(default_factory=list)

    def add(self, wish: str, reason: str, remedy: str) -> None:
        """Take a wish that cannot be fulfilled.

        Raises:
            Refused: the run refuses such requests.
        """
        if not self.overrides:
            raise Refused(f"{wish}{reason}. {remedy}")
        self.collected.append(wish)

    def read_fields(self, body: Mapping[str, Any], fields: Fields) -> dict[str, Any]:
        """Return the fields of a request that have a value; those that its API does not read are checked.

        Raises:
            Refused: the run refuses what one asks for, no answer has the form that one asks for, or a text has
                characters that cannot be encoded.
        """
        given = {name: value for name, value in body.items() if value is not None}
        check_characters(given, "the request")
        self.check(given, fields)
        return given

    def allow_calls(self, choice: Any) -> bool:
        """Return whether a turn may call tools by the `tool_choice` of a request; one cannot be forced into a call.

        Raises:
            Refused: the run refuses such requests.
        """
        if choice not in ("auto", "none"):
            self.add(f"tool_choice={choice!r}", ": a turn cannot be forced to call a tool", "Write auto or none")
        return bool(choice != "none")

    def check(self, given: Mapping[str, Any], fields: Fields) -> None:
        """Check the fields of a request that its API does not read.

        Raises:
            Refused: the run refuses what one asks for, or no answer has the form that one asks for.
        """
        for name, value in given.items():
            wish, remedy = f"{name}={printable(repr(value), 60)}", f"Leave {name} out of the request"
            if name in SAMPLED_BY:
                self.check_number(name, value, wish, remedy)
            elif name in fields.forms:
                if value not in fields.forms[name]:
                    raise Refused(f"{wish} is not supported here. {remedy}")
            elif name in fields.neutral:
                if value not in fields.neutral[name]:
                    self.add(wish, WOULD_CHANGE, remedy)
            elif name not in fields.read and name not in fields.unused:
                self.add(name, " is not supported here", "Leave it out of the request")

    def check_number(self, name: str, value: Any, wish: str, remedy: str) -> None:
        """Check one of the numbers of `SAMPLED_BY`, of which the run has its own."""
        own = getattr(self.sampling, name)
        is_same = value == own or (name == "top_k" and {repr(value), repr(own)} <= {"0", "-1"})
        if not is_same:
            flag = f"(rollout.{name}; in evaluations eval.{name} where there is one)"
            self.add(wish, f": this run samples with {own:g} {flag}", remedy)


@dataclass(frozen=True)
class Fields:
    """The fields of an API's requests."""

    read: tuple[str, ...]
    unused: tuple[str, ...]  # they mean nothing here
    neutral: Mapping[str, tuple[Any, ...]]  # the values with which a field does nothing
    forms: Mapping[str, tuple[Any, ...]]  # as `neutral`; with others the answer would have another form


def check_characters(given: object, where: str) -> None:
    """Raise Refused if a text in a JSON value cannot be encoded: no tokenizer and no engine takes it."""
    try:
        json.dumps(given, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        raise Refused(f"{where} holds half of a surrogate pair, which is not a character") from error
    except RecursionError as error:
        raise Refused(f"{where} is nested too deeply") from error


def limit_of(given: Mapping[str, Any], *names: str) -> int | None:
    """Return the most tokens of the turn, the first of the named fields; None: as many as fit."""
    name = next((name for name in names if name in given), names[-1])
    limit = given.get(name)
    if limit is None or (isinstance(limit, int) and not isinstance(limit, bool) and limit >= 1):
        return limit
    raise Refused(f"{name}={printable(repr(limit), 60)} must be a whole number above 0")


def stop_of(given: Any, name: str) -> tuple[str, ...] | None:
    """Return the strings that end the turn; None: those of rollout.stop."""
    stop = [given] if isinstance(given, str) else given
    if stop is not None and not (isinstance(stop, list) and all(isinstance(text, str) and text for text in stop)):
        raise Refused(f"{name} must be a text or a list of texts")
    return None if stop is None else tuple(stop)


def list_of(given: Any, name: str) -> list[Any]:
    """Return a list of a request."""
    if not isinstance(given, list):
        raise Refused(f"{name} must be a list")
    return given


def text_of(given: Any, where: str, kinds: Sequence[str] = ("text",)) -> str:
    """Return a text: one, nothing, or a list of texts and of parts of these kinds."""
    parts = [] if given is None else [given] if isinstance(given, str) else given
    texts = None
    if isinstance(parts, list):
        texts = [
            part.get("text") if isinstance(part, dict) and part.get("type", "text") in kinds else part for part in parts
        ]
    if texts is None or not all(isinstance(text, str) for text in texts):
        raise Refused(f"{where}: the content must be a text, or a list of parts with texts; images are not understood")
    return "".join(map(str, texts))


def tool_of(name: Any, description: Any, parameters: Any, where: str) -> Schema:
    """Return a tool as the chat template shows it."""
    if not isinstance(name, str) or not name:
        raise Refused(f"{where} must have a name")
    function = {"name": name, "description": description, "parameters": parameters}
    return {"type": "function", "function": {key: value for key, value in function.items() if value is not None}}


def check_tools(given: Sequence[Schema]) -> tuple[Schema, ...]:
    """Return the tools of a request; raise Refused if they are too long to be shown."""
    if (count := len(json.dumps(given))) > MAX_TOOLS:
        raise Refused(f"the tools have {count} characters of JSON, more than {MAX_TOOLS}")
    return tuple(given)


def call_of(identity: Any, name: Any, arguments: Any, where: str) -> dict[str, Any]:
    """Return a call of a tool in a message of the model. `arguments`: an object, or the JSON of one."""
    if not isinstance(name, str):
        raise Refused(f"{where}: a call of a tool must have a name")
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments or "{}")
        except (ValueError, RecursionError):
            arguments = None
    if not isinstance(arguments, dict):
        raise Refused(f"{where}: the arguments of {name} are not a JSON object")
    check_characters(arguments, where)
    return {"id": str(identity or ""), "type": "function", "function": {"name": name, "arguments": arguments}}


def tool_answer(identity: Any, content: str) -> Message:
    """Return the answer of a tool to the call with an id. `with_names` tells of which tool it is."""
    return {"role": "tool", "content": content, "tool_call_id": str(identity or "")}


def with_names(messages: Sequence[Message]) -> tuple[Message, ...]:
    """Return a whole conversation in which each answer of a tool has the name of the tool.

    Raises:
        Refused: the model has made no such call before.
    """
    names, named = dict[str, str](), list[Message]()
    for place, message in enumerate(messages):
        names.update((call["id"], call["function"]["name"]) for call in message.get("tool_calls", ()))
        if message["role"] != "tool":
            named.append(message)
            continue
        identity = message["tool_call_id"]
        if identity not in names:
            answered = f"message {place} of the conversation answers the call {printable(repr(identity), 60)}"
            raise Refused(f"{answered} of a tool, which no message of the assistant before it makes")
        named.append(message | {"name": names[identity]})
    return tuple(named)


def check_conversation(messages: Sequence[Message], name: str) -> tuple[Message, ...]:
    """Return the messages of a request; raise Refused if the model is not the one to speak."""
    if not messages:
        raise Refused(f"{name} must be a list with at least one message")
    if messages[-1]["role"] == "assistant":
        raise Refused("the last message is of the assistant, and the endpoint cannot continue a turn that has begun")
    return tuple(messages)


def message_to_send(turn: Turn, request: ChatRequest, stop: Sequence[str], count: int) -> tuple[Message, str | None]:
    """Return a turn as the message that the client sees, and the string that ended it. Calls that cannot be read, or
    may not be made, are text.

    `stop`: strings that end a turn, which are not part of the message; `count`: calls of the episode so far, which
    number the ids of these.
    """
    if turn.calls and request.may_call and not any(call.problem for call in turn.calls):
        message = turn.message()
        for number, call in enumerate(message["tool_calls"], start=count + 1):
            call["id"] = CALL_ID.format(number)
        return message, None
    content = turn.text.strip() if turn.calls else turn.content
    ended_by = None
    for end in stop:
        if end in content:
            content, ended_by = content.partition(end)[0], end
    message = {"role": "assistant", "content": content}
    reasoning = {"reasoning_content": turn.reasoning} if turn.reasoning and not turn.calls else {}
    return message | reasoning, ended_by


def event(data: Mapping[str, Any], name: str | None = None) -> bytes:
    """Return an event of a stream."""
    head = "" if name is None else f"event: {name}\n"
    return f"{head}data: {json.dumps(data)}\n\n".encode()
