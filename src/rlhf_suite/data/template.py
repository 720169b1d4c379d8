"""Chat templates: the prompt text of a model at each turn of a conversation, and the response text that it writes.

At inference a model gets the rendering of the messages so far, with the generation prompt, and writes its response
after that. Many templates render a finished conversation differently: they drop the reasoning of earlier turns, or the
`<think>` that the generation prompt opens. So every turn is rendered as the prompt of that turn. If the template's
rendering of the response does not continue that prompt, the response is appended as a rollout would write it.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from jinja2 import TemplateError

from rlhf_suite.config.declarations.data import DataConfig, variables_of
from rlhf_suite.data.messages import Message, list_called_functions
from rlhf_suite.data.row import Row, RowError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

APPENDED = "a response appended to the generation prompt as a model writes it: the chat template renders it differently"
CLOSED = "an empty reasoning part: the generation prompt opens it, and the response has no reasoning"
NO_REASONING = "reasoning_content dropped: the chat template does not render it"
OPENED = re.compile(r"<(\w+)>\s*\Z")  # a tag that a generation prompt leaves open: <think>
SHUT = re.compile(r"</(\w+)>\s*\Z")  # a tag that it has closed already
TAIL = 64  # characters at the end of a prompt that are searched for these tags
# What a template raises for messages that it refuses, or its own code by mistake.
UNRENDERED = (TemplateError, TypeError, LookupError, ValueError, AttributeError, ArithmeticError)
MARK = "\N{OBJECT REPLACEMENT CHARACTER}answer\N{OBJECT REPLACEMENT CHARACTER}"  # stands for a response


@dataclass(frozen=True)
class Turn:
    """The prompt of one turn, the response to it, and notes on how they differ from the row."""

    prompt: str
    response: str
    notes: tuple[str, ...] = ()


class ChatTemplate:
    """The chat template of a tokenizer, with the variables of data.chat_template_kwargs."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, config: DataConfig) -> None:
        self.tokenizer, self.variables = tokenizer, variables_of(config.chat_template_kwargs)

    def text(
        self, messages: Sequence[Message], row: Row, tools: list[Any] | None = None, generation_prompt: bool = False
    ) -> str:
        """Return the rendering of `messages`.

        Raises:
            RowError: the template cannot render them.
        """
        if any(is_text_in_parts(message) for message in messages) and not self.reads_parts():
            messages = [join_parts(message) for message in messages]
        try:
            return self.render(messages, tools, generation_prompt)
        except UNRENDERED as error:
            raise RowError(row.where, f"the chat template cannot render the conversation: {error}") from error

    def render(self, messages: Sequence[Message], tools: list[Any] | None, generation_prompt: bool) -> str:
        """Return what the template makes of messages as they are."""
        return str(
            self.tokenizer.apply_chat_template(
                list(messages), tools=tools, tokenize=False, add_generation_prompt=generation_prompt, **self.variables
            )
        )

    def reads_parts(self) -> bool:
        """Return whether the template renders the text of a content that is a list of parts, and not the list itself,
        as Python writes it."""
        parts = [{"type": "text", "text": MARK}]
        try:
            text = self.render([{"role": "user", "content": parts}], None, generation_prompt=False)
        except UNRENDERED:
            return False
        return MARK in text and f"'{MARK}'" not in text and f'"{MARK}"' not in text

    def turn(self, prompt: list[Message], response: list[Message], row: Row, tools: list[Any] | None = None) -> Turn:
        """Return the turn in which the model gets `prompt` and writes `response`, which is one message or several."""
        before = self.text(prompt, row, tools, generation_prompt=True)
        full = self.text([*prompt, *response], row, tools)
        if full.startswith(before):
            written, opened = full[len(before) :], OPENED.search(before[-TAIL:])
            shown = opened[0] + written if opened else written
            if all(contains_text(shown, message) for message in response):
                self.check_calls(written, response, row)
                lost = any(lacks_reasoning(written, message) for message in response)
                return Turn(before, self.up_to_end_token(written), (NO_REASONING,) if lost else ())
        return self.append_turn(before, prompt, response, row, tools)

    def append_turn(
        self, before: str, prompt: list[Message], response: list[Message], row: Row, tools: list[Any] | None
    ) -> Turn:
        """Return the turn whose response is appended to the generation prompt, with what the template writes around a
        response."""
        if len(response) > 1 or list_called_functions(response[0]) or not isinstance(response[0]["content"], str):
            problem = "a response of several messages" if len(response) > 1 else "a tool call"
            raise RowError(row.where, f"the chat template does not render {problem} after its own generation prompt")
        rendered = self.text([*prompt, {"role": "assistant", "content": MARK}], row, tools)
        head, mark, tail = rendered.rpartition(MARK)
        if not mark:
            raise RowError(row.where, "the chat template does not render the text of the response")
        body, notes = continue_prompt(before, head, response[0], row)
        return Turn(before, body + self.up_to_end_token(tail), (APPENDED, *notes))

    def up_to_end_token(self, text: str) -> str:
        """Return `text` up to its end-of-sequence token, if the template ends the turn with one.

        White space after that token is a separator, which belongs to the next turn and not to the model's response.
        """
        end = str(self.tokenizer.eos_token)
        return text.rstrip() if text.rstrip().endswith(end) else text

    def check_calls(self, written: str, response: list[Message], row: Row) -> None:
        """Raise RowError unless the rendering contains the names of all called functions."""
        if not all(name in written for message in response for name in list_called_functions(message)):
            raise RowError(row.where, "the chat template does not render tool_calls; set data.tokenizer_chat_template")


def is_text_in_parts(message: Message) -> bool:
    """Return whether the content of a message is a list of parts, all of which are text."""
    content = message.get("content")
    return isinstance(content, list) and all(
        isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str) for part in content
    )


def join_parts(message: Message) -> Message:
    """Return the message with its parts of text as one text, a line for each part, as vLLM serves such messages."""
    if not is_text_in_parts(message):
        return message
    return {**message, "content": "\n".join(part["text"] for part in message["content"])}


def contains_text(rendering: str, message: Message) -> bool:
    """Return whether the rendering of a response contains its text, apart from differences in white space."""
    content = message["content"]
    if not isinstance(content, str) or content.strip() in rendering:
        return True
    return "".join(content.split()) in "".join(rendering.split())


def lacks_reasoning(written: str, message: Message) -> bool:
    """Return whether a message has reasoning beside its content that its rendering does not contain."""
    reasoning = message.get("reasoning_content")
    return isinstance(reasoning, str) and reasoning.strip() not in written


def continue_prompt(before: str, head: str, message: Message, row: Row) -> tuple[str, tuple[str, ...]]:
    """Return the text of a response that continues the generation prompt `before`, and notes on changes.

    Reasoning that this prompt opens continues in the response and is closed there. `head` is what the template writes
    before the text of a finished response.
    """
    content, reasoning = message["content"].strip(), str(message.get("reasoning_content") or "").strip()
    opened, shut = OPENED.search(before[-TAIL:]), SHUT.search(before[-TAIL:])
    if opened is None or head.rstrip().endswith(f"<{opened[1]}>"):
        if shut and (reasoning or f"</{shut[1]}>" in content):
            problem = "the response has reasoning, but the generation prompt closes the reasoning part"
            raise RowError(row.where, f"{problem}; see data.chat_template_kwargs")
        gap = head[len(head.rstrip()) :]
        return ("" if before.endswith(gap) else gap) + content, (NO_REASONING,) if reasoning else ()
    name = opened[1]
    if f"</{name}>" in content:
        return content.removeprefix(f"<{name}>").lstrip("\n"), ()
    if reasoning:
        return f"{reasoning}\n</{name}>\n\n{content}", ()
    gap = "\n" if before.endswith("\n") else "\n\n"
    return f"{gap}</{name}>\n\n{content}", (CLOSED,)
