"""vLLM's parsers of tool calls, which need no engine: each makes content and calls of a text.

They are imported only for agent.tool_parser=vllm, since vLLM takes seconds to import. A parser keeps what it has read,
so each turn has one of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from rlhf_suite.agents.base import Schema
from rlhf_suite.errors import UserError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# Of a text and the tools: the content, and the name and the arguments, as JSON, of each call.
CallReader = Callable[[str, Sequence[Schema]], tuple[str, list[tuple[str, str]]]]
FLAG = "agent.vllm_tool_parser"


def call_reader(name: str | None, tokenizer: PreTrainedTokenizerBase) -> CallReader:
    """Return the parser `name` of vLLM.

    Raises:
        UserError: there is none of this name, it cannot read this tokenizer's text, or it reads streams alone.
    """
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
    from vllm.tool_parsers import ToolParserManager

    known = sorted({**ToolParserManager.lazy_parsers, **ToolParserManager.tool_parsers})
    if name not in known:
        raise UserError(f"{FLAG}={'null' if name is None else name} is not a parser of vLLM; write {', '.join(known)}")
    make: Any = ToolParserManager.get_tool_parser(name)

    def read(text: str, tools: Sequence[Schema]) -> tuple[str, list[tuple[str, str]]]:
        request = ChatCompletionRequest(messages=[], model="", tools=list(tools) or None)
        result = make(tokenizer, request.tools).extract_tool_calls(text, request)
        calls = [(call.function.name, call.function.arguments) for call in result.tool_calls]
        return result.content or "", calls

    try:
        read("", [])
    except NotImplementedError as error:
        raise UserError(f"{FLAG}={name} reads only streams; choose another parser") from error
    except Exception as error:
        reason = f"{type(error).__name__}: {error}"
        raise UserError(f"{FLAG}={name} is not for this tokenizer ({reason}); take another parser") from error
    return read
