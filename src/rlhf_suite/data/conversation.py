"""A conversation in progress: its turns, and the token ids of the prompt for the next response."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

from rlhf_suite.config.declarations.data import DataConfig
from rlhf_suite.data.messages import Message
from rlhf_suite.data.render import RewardText, begin_ids, fill, tokens
from rlhf_suite.data.row import Row, RowError
from rlhf_suite.data.template import ChatTemplate

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

HERE = "the conversation"


class Conversation:
    """User and assistant turns after an optional system message. A prompt may have at most
    `max_prompt_tokens` tokens."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, config: DataConfig, max_prompt_tokens: int) -> None:
        self.tokenizer, self.config, self.max_prompt_tokens = tokenizer, config, max_prompt_tokens
        self.is_templated = config.apply_chat_template and tokenizer.chat_template is not None
        self.begin = [] if self.is_templated else begin_ids(tokenizer)
        self.template = ChatTemplate(tokenizer, config)
        self.rewards = RewardText(config.reward_template)
        self.system: str | None = None
        self.turns: list[Message] = []

    @property
    def messages(self) -> list[Message]:
        """Return the system message, if there is one, and the turns."""
        return self._with_system(self.turns)

    def set_system(self, text: str | None) -> None:
        """Replace the system message.

        Raises:
            RowError: the chat template has no system messages; the present one stays.
        """
        before, self.system = self.system, text or None
        try:
            self._ids([{"role": "user", "content": "x"}])
        except RowError:
            self.system = before
            raise

    def add_message(self, text: str) -> tuple[list[int], int]:
        """Add a user message. Return the prompt ids, and how many of the oldest turns were dropped to make room.

        Raises:
            RowError: the message does not fit even alone, or the template rejects it; the conversation stays as it was.
        """
        turns: list[Message] = [*self.turns, {"role": "user", "content": text}]
        dropped = 0
        while len(ids := self._ids(turns)) > self.max_prompt_tokens:
            if len(turns) == 1:
                most = f"at most {self.max_prompt_tokens} are possible (chat.max_len - chat.max_new_tokens)"
                raise RowError(HERE, f"the message has {len(ids)} tokens with its template; {most}")
            turns, dropped = turns[2:], dropped + 1
        self.turns = turns
        return ids, dropped

    def add_response(self, text: str) -> None:
        """Add the response to the last message."""
        self.turns.append({"role": "assistant", "content": text})

    def remove_message(self) -> None:
        """Remove the last message, which got no response."""
        self.turns.pop()

    def reset(self) -> None:
        """Remove all turns; the system message stays."""
        self.turns = []

    def save(self, path: Path) -> None:
        """Append the conversation to a .jsonl file as a row {"messages": [...]}, which
        `data.input_key=messages` reads."""
        with path.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"messages": self.messages}, ensure_ascii=False) + "\n")

    def _with_system(self, turns: list[Message]) -> list[Message]:
        return [{"role": "system", "content": self.system}, *turns] if self.system else list(turns)

    def _ids(self, turns: list[Message]) -> list[int]:
        return tokens(self.tokenizer, self._text(turns), self.begin)

    def _text(self, turns: list[Message]) -> str:
        """Return the prompt for a response to the last of `turns`, which asks for data.target_reward as the rows did
        that the model was trained on.

        Without a chat template each part has a line of its own: the system message, and each question in its template
        with its response after it.
        """
        if self.is_templated:
            row = Row({}, HERE, 1)
            messages = self.rewards.messages(self._with_system(turns), self.config.target_reward, row)
            return self.template.text(messages, row, generation_prompt=True)
        *earlier, last = [str(turn["content"]) for turn in turns[::2]]
        asked = [*earlier, self.rewards.prompt(last, self.config.target_reward)]
        questions = [fill(self.config.input_template, text) for text in asked]
        responses = [*(str(turn["content"]) for turn in turns[1::2]), ""]
        lines = [question + response for question, response in zip(questions, responses, strict=True)]
        return "\n".join([self.system, *lines] if self.system else lines)
