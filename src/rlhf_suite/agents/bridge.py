"""The bridge: the tokens between a sampled turn of the model and its next one, for any chat template.

What the model sampled is never rendered again: decoded text may have other tokens, and many templates drop the
reasoning of earlier turns. Only what others said is rendered, after a short stand-in for the sampled turn:

    [user "?", assistant "STANDIN", user "wrong"]
    -> ...STANDIN<|im_end|>\\n<|im_start|>user\\nwrong<|im_end|>\\n<|im_start|>assistant\\n

The bridge is what follows the stop token that the model has sampled itself, here <|im_end|>. That token is special, so
nothing merges across it. The bridge is tokenised after it, since many tokenizers put a space in front of a text of its
own; so the ids of the ledger and of the bridge are those of the whole text.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import takewhile
from typing import TYPE_CHECKING, Any

from rlhf_suite.agents.base import Schema
from rlhf_suite.config.declarations.data import DataConfig
from rlhf_suite.data.messages import Message
from rlhf_suite.data.render import begin_ids, encode_after, tokens
from rlhf_suite.data.row import Row, RowError
from rlhf_suite.data.template import ChatTemplate
from rlhf_suite.errors import UserError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

STANDIN, ANSWER = "STANDINofTURN", "ANSWERofOTHERS"  # plain letters: templates neither trim nor escape them
TAIL = 32  # tokens before a text that its first token may depend on
CALL_ID = "call{:05d}"  # nine letters and digits, which some templates insist on
ASKED = Row({}, "the conversation of an episode", 0)
QUESTION: Message = {"role": "user", "content": "?"}
TRIED: Schema = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Add.",
        "parameters": {"type": "object", "properties": {"value": {"type": "string"}}, "required": ["value"]},
    },
}
AFTER = {
    "user": "a user's message",
    "tool": "the answer of a tool",
    "request": "a user's message after the answer of a tool",  # which asks for a summary
    "system": "a message of the system",  # with which harnesses remind a model
}


class Bridge:
    """Continues conversations of one tokenizer, whose turns end with one of `stop_ids`."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, config: DataConfig, stop_ids: Sequence[int]) -> None:
        self.tokenizer, self.template = tokenizer, ChatTemplate(tokenizer, config)
        self.stops = {stop: str(tokenizer.convert_ids_to_tokens(stop)) for stop in stop_ids}
        self.begin = begin_ids(tokenizer)  # of a prompt of raw text
        self.closings: dict[tuple[str, int], str | None] = {}
        self.tried: dict[str, bool] = {}  # by role

    def prompt(self, messages: Sequence[Message], tools: Sequence[Schema] = ()) -> list[int]:
        """Return the ids of a whole conversation, with the generation prompt."""
        return tokens(self.tokenizer, self.render(messages, tools))

    def after(self, stop: int, answers: Sequence[Message], tools: Sequence[Schema] = ()) -> list[int] | None:
        """Return the ids between a turn that ended with the token `stop` and the next turn of the model.

        `answers` are messages of tools and of the user. None if a turn with that end cannot be continued so.
        """
        text = self.text_after(stop, answers, tools)
        return None if text is None else self.behind([stop], text)

    def behind(self, ids: Sequence[int], text: str) -> list[int]:
        """Return the ids of a text that stands after `ids`, which stay as they were sampled."""
        return encode_after(self.tokenizer, str(self.tokenizer.decode(ids[-TAIL:])), text)

    def on_from(self, stop: int, answers: Sequence[Message], tools: Sequence[Schema] = ()) -> list[int] | None:
        """Return what `after` returns, or None where the template does not let a conversation go on with such
        messages, which may be of any role."""
        roles = {str(message["role"]) for message in answers}
        if not answers or not all(role in AFTER and self.goes_on_with(role) for role in roles):
            return None
        return self.after(stop, answers, tools)

    def goes_on_with(self, role: str) -> bool:
        """Return whether a conversation can go on with messages of a role."""
        if role not in self.tried:
            try:
                self.tried[role] = self.problem(role) is None
            except RowError:
                self.tried[role] = False
        return self.tried[role]

    def text_after(self, stop: int, answers: Sequence[Message], tools: Sequence[Schema] = ()) -> str | None:
        """Return the text of the bridge, or None; see `after`."""
        closing = self.render_closing(answers, stop, tools)
        if closing is None:
            return None
        rest = self.rest(answers, tools)
        assert rest.startswith(closing), f"the chat template ends a turn with {rest[:40]!r}, and with {closing!r}"
        return rest[len(closing) :]

    def render_closing(self, answers: Sequence[Message], stop: int, tools: Sequence[Schema]) -> str | None:
        """Return what the template writes after the text of a turn, up to and including `stop`.

        None if the template writes no such token there. A token in the text of an answer does not count.
        """
        role = str(answers[0]["role"])
        if (role, stop) not in self.closings:
            tried = {**answers[0], "content": ANSWER}
            header, answered, _ = self.rest([tried], tools).partition(ANSWER)
            before, mark, _ = header.partition(self.stops.get(stop, ANSWER))
            self.closings[role, stop] = before + mark if answered and mark else None
        return self.closings[role, stop]

    def rest(self, answers: Sequence[Message], tools: Sequence[Schema]) -> str:
        """Return what follows the text of the stand-in in the rendering of a conversation that goes on with
        `answers`."""
        calls = list(takewhile(lambda message: message["role"] == "tool", answers))
        mark, said = STANDIN, repr(answers)
        while mark in said:  # others may say anything
            mark += "N"
        try:
            text = self.render([QUESTION, stand_in(calls, mark), *answers], tools)
        except RowError:
            if len(calls) < 2:
                raise
            text = self.render([QUESTION, stand_in(calls[:1], mark), *answers], tools)  # it allows one call in a turn
        _, standin, rest = text.rpartition(mark)
        if not standin:
            raise RowError(ASKED.where, "the chat template does not render " + ("tool calls" if calls else "a turn"))
        return rest

    def render(self, messages: Sequence[Message], tools: Sequence[Schema]) -> str:
        """Return the text of a conversation, with the generation prompt."""
        return self.template.text(messages, ASKED, list(tools) or None, generation_prompt=True)

    def check(self, roles: Sequence[str]) -> None:
        """Check that a conversation can go on with messages of these roles, "user" and "tool".

        Raises:
            UserError: it cannot, with the reason.
        """
        for role in roles:
            try:
                problem = self.problem(role)
            except RowError as error:
                problem = error.reason
            if problem is not None:
                raise UserError(
                    f"data.apply_chat_template=true: with this chat template a conversation cannot continue with "
                    f"{AFTER[role]}: {problem}. Set another data.tokenizer_chat_template, or answer with raw text "
                    "(agent.kind=environment, data.apply_chat_template=false)"
                )

    def problem(self, role: str) -> str | None:
        """Return why messages of a role cannot follow a turn, or None."""
        answers: list[Message] = [{"role": role if role == "system" else "user", "content": "4"}]
        tools = [TRIED] if role in ("tool", "request") else []
        if tools:
            called: Message = {"role": "tool", "content": "4", "name": "add", "tool_call_id": CALL_ID.format(1)}
            answers = [called, *(answers if role == "request" else ())]
        stops = [stop for stop in self.stops if self.render_closing(answers, stop, tools) is not None]
        if not stops:
            return f"it does not end a turn with one of {', '.join(self.stops.values())}, which end responses"
        turn: Message = {"role": "assistant", "content": "2 + 2"}
        if tools:
            turn |= {"content": "", "tool_calls": [call_of(answers[0], "2 + 2")]}
        for before in ([QUESTION], [QUESTION, {"role": "assistant", "content": "Yes."}, QUESTION]):
            whole = self.render([*before, turn, *answers], tools)
            for stop in stops:
                if problem := self.problem_in(whole, stop, answers, tools):
                    return problem
        return None

    def problem_in(self, whole: str, stop: int, answers: Sequence[Message], tools: Sequence[Schema]) -> str | None:
        """Return how the rendering of a whole conversation, which ends with `answers`, differs from its parts, or
        None."""
        text = self.text_after(stop, answers, tools)
        assert text is not None
        head, name = whole.removesuffix(text), self.stops[stop]
        if not whole.endswith(name + text):
            return "it renders an answer differently in a longer conversation"
        ids = self.behind([stop], text)
        if "".join(str(self.tokenizer.decode(ids)).split()) != "".join(text.split()):  # decoders add and drop spaces
            return f"the text after {name} is another when it is encoded and decoded"
        if tokens(self.tokenizer, head) + ids != tokens(self.tokenizer, whole):
            return f"the text after {name} has other tokens in a whole conversation"
        return None


def stand_in(calls: Sequence[Message], mark: str) -> Message:
    """Return the message in place of a sampled turn: the text `mark`, or the calls that `calls`, messages of tools,
    answer, each with this text as its argument."""
    if not calls:
        return {"role": "assistant", "content": mark}
    return {"role": "assistant", "content": "", "tool_calls": [call_of(call, mark) for call in calls]}


def call_of(answer: Message, value: str) -> dict[str, Any]:
    """Return a tool call that a tool's message answers."""
    function = {"name": answer.get("name") or "tool", "arguments": {"value": value}}
    return {"id": answer.get("tool_call_id") or CALL_ID.format(1), "type": "function", "function": function}
