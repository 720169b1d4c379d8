"""What a turn says: its reasoning, its content and its calls of tools.

What is read here decides what is executed and never becomes tokens again: the ledger keeps what was sampled.
A call that cannot be read is a call with a problem, so that the environment can say so to the model.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from rlhf_suite.agents.base import Schema, ToolCall, Turn
from rlhf_suite.agents.bridge import CALL_ID
from rlhf_suite.agents.model_json import find_problem, read_json
from rlhf_suite.agents.vllm_parsers import CallReader, call_reader
from rlhf_suite.data.generation import Generation
from rlhf_suite.data.template import OPENED
from rlhf_suite.errors import UserError
from rlhf_suite.registry import tool_parser

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

PROMPT_TAIL = 16  # tokens at the end of a prompt, in which a tag is looked for that it leaves open
CUT_OFF = "the turn was cut off at the length limit"
HERMES = re.compile(r"<tool_call>(.*?)(?:</tool_call>|\Z)", re.DOTALL)
THINK = "<think>", "</think>"
PYTHON_TAG = "<|python_tag|>"


@dataclass(frozen=True)
class Written:
    """A turn before it is read: `text` is all of it with special tokens, but for the one that ended it."""

    text: str
    ids: Sequence[int]
    prompt_ids: Sequence[int]
    tokenizer: PreTrainedTokenizerBase
    read_calls: CallReader | None = None  # the parser agent.vllm_tool_parser


@dataclass(frozen=True)
class Parsed:
    """What a parser found. Ids of the calls are set later."""

    content: str
    calls: tuple[ToolCall, ...] = ()
    reasoning: str = ""


Parser = Callable[[Written, Sequence[Schema]], Parsed]


class TurnReader:
    """Makes turns of responses. `parser` is the name of one, in agent.tool_parser; None: turns have no calls.
    `of_vllm`: agent.vllm_tool_parser."""

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        stop_ids: Sequence[int],
        parser: str | None = None,
        of_vllm: str | None = None,
    ) -> None:
        self.tokenizer, self.stop_ids, self.parser = tokenizer, frozenset(stop_ids), parser
        self.read_calls = call_reader(of_vllm, tokenizer) if parser == vllm.__name__ else None
        self.parse: Parser = plain if parser is None else tool_parser.load(parser)
        if parser == response_template.__name__:
            check_response_template(tokenizer)

    def turn(self, generation: Generation, prompt_ids: Sequence[int], tools: Sequence[Schema]) -> Turn:
        """Return a response as a turn. Calls of one that was cut off have that as their problem."""
        ids = generation.ids.astype(np.int64)
        said = ids[:-1] if len(ids) and int(ids[-1]) in self.stop_ids else ids
        written = Written(self.decode(said, False), ids.tolist(), prompt_ids, self.tokenizer, self.read_calls)
        parsed = self.parse(written, tools)
        if not isinstance(parsed, Parsed):
            raise tool_parser.wrong_result(str(self.parser), parsed, "Parsed(content, calls, reasoning)")
        is_cut = generation.finish_reason == "length"
        calls = tuple(
            replace(call, id=CALL_ID.format(number), problem=CUT_OFF if is_cut else call.problem)
            for number, call in enumerate(map(check_call, parsed.calls), start=1)
        )
        text = self.decode(said, True)
        return Turn(ids, text, parsed.content, parsed.reasoning, calls, "length" if is_cut else "stop")

    def decode(self, ids: NDArray[np.int64], skip_special_tokens: bool) -> str:
        return str(self.tokenizer.decode(ids, skip_special_tokens=skip_special_tokens))


def plain(written: Written, tools: Sequence[Schema]) -> Parsed:
    """Return the content and the reasoning of a turn without calls."""
    reasoning, content = without_reasoning(written)
    return Parsed(content, (), reasoning)


def without_reasoning(written: Written) -> tuple[str, str]:
    """Return the reasoning of a turn, and the rest. The prompt may have opened it."""
    begin, end = THINK
    text = written.text.lstrip()
    opened = OPENED.search(str(written.tokenizer.decode(written.prompt_ids[-PROMPT_TAIL:])))
    if not (text.startswith(begin) or (opened is not None and opened[0].strip() == begin)):
        return "", written.text.strip()
    reasoning, _, content = text.removeprefix(begin).partition(end)
    return reasoning.strip(), content.strip()


@tool_parser()
def hermes(written: Written, tools: Sequence[Schema]) -> Parsed:
    """Calls as JSON objects between <tool_call> and </tool_call>, as Hermes and Qwen write them."""
    reasoning, text = without_reasoning(written)
    calls = tuple(call_of_json(match[1]) for match in HERMES.finditer(text))
    return Parsed(HERMES.sub("", text).strip(), calls, reasoning)


@tool_parser(name="json")
def whole_json(written: Written, tools: Sequence[Schema]) -> Parsed:
    """One call, or a list of calls, as JSON in place of a text, as Llama 3 writes them."""
    reasoning, text = without_reasoning(written)
    body = text.removeprefix(PYTHON_TAG).strip()
    if not body.startswith(("{", "[{")):
        return Parsed(text, (), reasoning)
    try:
        value = read_json(body)
    except ValueError:
        return Parsed("", (call_of_json(body),), reasoning)
    return Parsed("", tuple(map(call_of_value, value if isinstance(value, list) else [value])), reasoning)


@tool_parser()
def response_template(written: Written, tools: Sequence[Schema]) -> Parsed:
    """Calls as the tokenizer's own response_template describes them (transformers)."""
    try:
        message = written.tokenizer.parse_response(
            list(written.ids), prefix=list(written.prompt_ids), tools=list(tools)
        )
    except (ValueError, RecursionError) as error:
        reasoning, text = without_reasoning(written)
        return Parsed(text, (ToolCall("", "", problem=f"the call cannot be read: {error}"),), reasoning)
    calls = tuple(call_of_value(call.get("function", call)) for call in message.get("tool_calls") or ())
    thinking = message.get("reasoning_content") or message.get("thinking") or ""
    return Parsed(str(message.get("content") or "").strip(), calls, str(thinking).strip())


@tool_parser(reads=("vllm_tool_parser",))
def vllm(written: Written, tools: Sequence[Schema]) -> Parsed:
    """Calls as one of vLLM's own parsers reads them, agent.vllm_tool_parser."""
    assert written.read_calls is not None, "the reader of turns loads it"
    reasoning, text = without_reasoning(written)
    try:
        content, named_calls = written.read_calls(text, tools)
    except Exception as error:  # whatever a foreign parser makes of what a model wrote
        problem = f"the call cannot be read: {type(error).__name__}: {error}"
        return Parsed(text, (ToolCall("", "", problem=problem),), reasoning)
    calls = tuple(call_of_value({"name": name, "arguments": arguments}) for name, arguments in named_calls)
    return Parsed(content.strip(), calls, reasoning)


def check_call(call: ToolCall) -> ToolCall:
    """Return a call as it is, or one with a problem where its name and arguments cannot be passed on as JSON."""
    problem = find_problem([call.name, call.arguments])
    return call if problem is None else ToolCall("", "", problem=f"the call cannot be used: {problem}")


def check_response_template(tokenizer: PreTrainedTokenizerBase) -> None:
    """Raise UserError if the tokenizer does not say how its model's responses are read."""
    problem = None
    try:
        tokenizer.parse_response("", prefix="")
    except AttributeError:
        problem = "the tokenizer has no response_template"
    except ValueError as error:
        problem = f"the response_template of the tokenizer: {error}"
    if problem is not None:
        raise UserError(f"agent.tool_parser=response_template: {problem}. Write agent.tool_parser=hermes or json")


def call_of_json(text: str) -> ToolCall:
    """Return the call in a JSON object, or one with a problem."""
    try:
        return call_of_value(read_json(text))
    except ValueError as error:
        return ToolCall("", "", problem=f"the call is not a JSON object: {error}")


def call_of_value(value: Any) -> ToolCall:
    """Return the call in {"name": ..., "arguments": {...}}; arguments may be JSON text, or be called parameters."""
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        return ToolCall("", "", problem="the call has no name")
    arguments = value.get("arguments", value.get("parameters", {}))
    if isinstance(arguments, str):
        try:
            arguments = read_json(arguments)
        except ValueError as error:
            return ToolCall("", value["name"], problem=f"the arguments are not JSON: {error}")
    if not isinstance(arguments, dict):
        return ToolCall("", value["name"], problem="the arguments are not an object")
    return ToolCall("", value["name"], arguments)
