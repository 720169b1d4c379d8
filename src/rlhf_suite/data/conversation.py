"""A conversation under way: its turns, and the token ids of the prompt that asks for the next answer."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

from rlhf_suite.config.chat import ChatTextConfig
from rlhf_suite.data.messages import Message
from rlhf_suite.data.render import begin_ids, fill, tokens
from rlhf_suite.data.row import Row, RowError
from rlhf_suite.data.template import ChatTemplate

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

HERE = "the conversation"


class Conversation:
    """User and assistant in turns, after a system message or none. `room`: tokens that a prompt may have."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, config: ChatTextConfig, room: int) -> None:
        self.tokenizer, self.config, self.room = tokenizer, config, room
        self.is_templated = config.apply_chat_template and tokenizer.chat_template is not None
        self.begin = [] if self.is_templated else begin_ids(tokenizer)
        self.template = ChatTemplate(tokenizer, config)
        self.system: str | None = None
        self.turns: list[Message] = []

    @property
    def messages(self) -> list[Message]:
        """The system message, then the turns."""
        return self._with_system(self.turns)

    def set_system(self, text: str | None) -> None:
        """Take another system message; RowError if the chat template knows none, which leaves the present one."""
        before, self.system = self.system, text or None
        try:
            self._ids([{"role": "user", "content": "x"}])
        except RowError:
            self.system = before
            raise

    def ask(self, text: str) -> tuple[list[int], int]:
        """Take a message; returns the prompt's ids, and how many of the oldest turns were dropped to make room.

        Raises:
            RowError: the message has no room even alone, or the template refuses it; the conversation stays as it was.
        """
        turns: list[Message] = [*self.turns, {"role": "user", "content": text}]
        dropped = 0
        while len(ids := self._ids(turns)) > self.room:
            if len(turns) == 1:
                what = f"the message has {len(ids)} tokens with what goes around it, and there is room for {self.room}"
                raise RowError(HERE, f"{what} (chat.max_len less chat.max_new_tokens)")
            turns, dropped = turns[2:], dropped + 1
        self.turns = turns
        return ids, dropped

    def answer(self, text: str) -> None:
        """Take the answer to the last message."""
        self.turns.append({"role": "assistant", "content": text})

    def withdraw(self) -> None:
        """Take the last message back: it got no answer."""
        self.turns.pop()

    def reset(self) -> None:
        """Forget the turns; the system message stays."""
        self.turns = []

    def save(self, path: Path) -> None:
        """Add the conversation to a .jsonl file as a row {"messages": [...]}, as `data.input_key=messages` reads it."""
        with path.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"messages": self.messages}, ensure_ascii=False) + "\n")

    def _with_system(self, turns: list[Message]) -> list[Message]:
        return [{"role": "system", "content": self.system}, *turns] if self.system else list(turns)

    def _ids(self, turns: list[Message]) -> list[int]:
        return tokens(self.tokenizer, self._text(turns), self.begin)

    def _text(self, turns: list[Message]) -> str:
        """The prompt for an answer to the last of `turns`. Without a chat template, pieces stand on lines of their own:
        the system message, and each question in its template with its answer behind it."""
        if self.is_templated:
            return self.template.text(self._with_system(turns), Row({}, HERE, 1), generation_prompt=True)
        questions = [fill(self.config.input_template, str(turn["content"])) for turn in turns[::2]]
        answers = [*(str(turn["content"]) for turn in turns[1::2]), ""]
        lines = [question + answer for question, answer in zip(questions, answers, strict=True)]
        return "\n".join([self.system, *lines] if self.system else lines)
