"""Chat templates: the text that a model is asked with at each turn of a conversation, and the text that it writes.

At inference a model gets the rendering of the messages so far, with the generation prompt, and its answer goes behind
that. Many templates render a finished conversation otherwise: they drop the reasoning of earlier turns, or leave out
what the generation prompt opens (`<think>`). So every turn is rendered as the model is asked at that turn. Where the
template's rendering of the answer does not go on from there, the answer is put there as a rollout would write it.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rlhf_suite.config.data import RenderConfig
from rlhf_suite.config.template_variables import variables_of
from rlhf_suite.data.messages import Message, called_functions
from rlhf_suite.data.row import Row, RowError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

APPENDED = "an answer put behind the generation prompt as a model writes it: the chat template renders it otherwise"
CLOSED = "reasoning that the generation prompt begins closed empty: the answer has none"
NO_REASONING = "reasoning_content left out: the chat template does not render it"
OPENED = re.compile(r"<(\w+)>\s*\Z")  # what a generation prompt leaves open: <think>
SHUT = re.compile(r"</(\w+)>\s*\Z")  # ... or has closed already
TAIL = 64  # characters of a prompt that are searched for them
MARK = "\N{OBJECT REPLACEMENT CHARACTER}answer\N{OBJECT REPLACEMENT CHARACTER}"  # stands for an answer


@dataclass(frozen=True)
class Turn:
    """What a model is asked with, what it writes, and how that is not as its row says."""

    before: str
    answer: str
    notes: tuple[str, ...] = ()


class ChatTemplate:
    """A tokenizer's chat template with the variables of data.chat_template_kwargs."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, config: RenderConfig) -> None:
        self.tokenizer, self.variables = tokenizer, variables_of(config.chat_template_kwargs)

    def text(
        self, messages: Sequence[Message], row: Row, tools: list[Any] | None = None, generation_prompt: bool = False
    ) -> str:
        """The rendering of `messages`; RowError where the template refuses them."""
        from jinja2 import TemplateError

        try:
            text = self.tokenizer.apply_chat_template(
                list(messages),
                tools=tools,
                tokenize=False,
                add_generation_prompt=generation_prompt,
                **self.variables,
            )
        except (TemplateError, TypeError, KeyError, ValueError) as error:
            raise RowError(row.where, f"the chat template cannot render the conversation: {error}") from error
        return str(text)

    def turn(self, prompt: list[Message], answer: list[Message], row: Row, tools: list[Any] | None = None) -> Turn:
        """The turn in which a model is asked with `prompt` and writes `answer`, one message or several."""
        before = self.text(prompt, row, tools, generation_prompt=True)
        full = self.text([*prompt, *answer], row, tools)
        if full.startswith(before):
            written, opened = full[len(before) :], OPENED.search(before[-TAIL:])
            shown = opened[0] + written if opened else written
            if all(holds(shown, message) for message in answer):
                self.check_calls(written, answer, row)
                lost = any(lacks_reasoning(written, message) for message in answer)
                return Turn(before, self.ended(written), (NO_REASONING,) if lost else ())
        return self.appended(before, prompt, answer, row, tools)

    def appended(
        self, before: str, prompt: list[Message], answer: list[Message], row: Row, tools: list[Any] | None
    ) -> Turn:
        """The turn whose answer goes behind the generation prompt, with what the template puts around an answer."""
        if len(answer) > 1 or called_functions(answer[0]) or not isinstance(answer[0]["content"], str):
            what = "an answer of several messages" if len(answer) > 1 else "a tool call"
            raise RowError(row.where, f"the chat template does not render {what} behind its own generation prompt")
        rendered = self.text([*prompt, {"role": "assistant", "content": MARK}], row, tools)
        head, mark, tail = rendered.rpartition(MARK)
        if not mark:
            raise RowError(row.where, "the chat template leaves out the text of the answer")
        body, notes = continued(before, head, answer[0], row)
        return Turn(before, body + self.ended(tail), (APPENDED, *notes))

    def ended(self, text: str) -> str:
        """A model's text up to its end-of-sequence token if the template ends the turn with it, since a separator
        behind it is written by whoever comes next."""
        end = str(self.tokenizer.eos_token)
        return text.rstrip() if text.rstrip().endswith(end) else text

    def check_calls(self, written: str, answer: list[Message], row: Row) -> None:
        """RowError unless the names of all called functions are in the rendering."""
        if not all(name in written for message in answer for name in called_functions(message)):
            raise RowError(row.where, "the chat template does not render tool_calls; set data.tokenizer_chat_template")


def holds(written: str, message: Message) -> bool:
    """Whether the rendering of an answer has its text, white space aside."""
    content = message["content"]
    if not isinstance(content, str) or content.strip() in written:
        return True
    return "".join(content.split()) in "".join(written.split())


def lacks_reasoning(written: str, message: Message) -> bool:
    """Whether the reasoning that a message has beside its content is not in its rendering."""
    reasoning = message.get("reasoning_content")
    return isinstance(reasoning, str) and reasoning.strip() not in written


def continued(before: str, head: str, message: Message, row: Row) -> tuple[str, tuple[str, ...]]:
    """The text of an answer behind the generation prompt that ends `before`, and what is to be said of it. Reasoning
    that this prompt opens goes on in the answer and is closed there. `head`: how the template begins once answered."""
    content, reasoning = message["content"].strip(), str(message.get("reasoning_content") or "").strip()
    opened, shut = OPENED.search(before[-TAIL:]), SHUT.search(before[-TAIL:])
    if opened is None or head.rstrip().endswith(f"<{opened[1]}>"):
        if shut and (reasoning or f"</{shut[1]}>" in content):
            what = "the answer has reasoning, but the generation prompt says that there is none"
            raise RowError(row.where, f"{what}; see data.chat_template_kwargs")
        gap = head[len(head.rstrip()) :]
        return ("" if before.endswith(gap) else gap) + content, (NO_REASONING,) if reasoning else ()
    name = opened[1]
    if f"</{name}>" in content:
        return content.removeprefix(f"<{name}>").lstrip("\n"), ()
    if reasoning:
        return f"{reasoning}\n</{name}>\n\n{content}", ()
    gap = "\n" if before.endswith("\n") else "\n\n"
    return f"{gap}</{name}>\n\n{content}", (CLOSED,)
