"""Columns of a row to text, and text to ids."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from rlhf_suite.config.data import TextConfig
from rlhf_suite.config.reward_text import says_reward, with_reward
from rlhf_suite.data.messages import Message, not_blank
from rlhf_suite.data.row import Row, RowError, joined_columns, required
from rlhf_suite.errors import UserError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def check_rendering(tokenizer: PreTrainedTokenizerBase, config: TextConfig, input_template: str | None) -> None:
    """UserError unless prompts can be rendered: there is a chat template, or the prompt template has its one {}."""
    if config.apply_chat_template:
        if tokenizer.chat_template is None:
            raise UserError(
                "data.apply_chat_template=true: the tokenizer has no chat template; set data.tokenizer_chat_template"
            )
        return
    mark = "\0"
    try:
        fits = fill(input_template, mark).count(mark) == 1
    except (IndexError, KeyError, ValueError):  # another {field}, or a lone brace
        fits = False
    if not fits:
        raise UserError(
            f"data.input_template={input_template!r} must have {{}} once, where the prompt goes; double other braces"
        )


def begin_ids(tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """The begin-of-sequence id as a list, if the tokenizer puts it before a text of its own accord; else empty."""
    begin = tokenizer.bos_token_id
    return [begin] if begin is not None and tokenizer("a")["input_ids"][0] == begin else []


def tokens(tokenizer: PreTrainedTokenizerBase, text: str, begin: Sequence[int] = ()) -> list[int]:
    """Ids of `text` alone, after `begin` unless the text begins with it already."""
    ids = list(tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])
    return ids if ids[: len(begin)] == list(begin) else [*begin, *ids]


def fill(input_template: str | None, prompt: str) -> str:
    """The prompt in its template."""
    return prompt if input_template is None else input_template.format(prompt)


def text_of(row: Row, key: str) -> str:
    """The text in column `key` (or in the columns of a comma list), not blank."""
    value = joined_columns(row, key)
    if isinstance(value, list):
        raise RowError(row.where, f"column {key!r} is a list: message lists need data.apply_chat_template=true")
    if not isinstance(value, str):
        raise RowError(row.where, f"column {key!r} is of type {type(value).__name__}, not text")
    return not_blank(value, key, row)


def columns_text(row: Row, names: Sequence[str]) -> str:
    """Columns of a row as a JSON object; what JSON does not know becomes text, and a number that is none null."""
    values = {name: row.values[name] if row.values.get(name, "") is None else required(row, name) for name in names}
    return json.dumps(finite(values), ensure_ascii=False, default=str)


def finite(value: object) -> object:
    """The value with null for every NaN and infinity, which are not JSON."""
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, dict):
        return {str(name): finite(each) for name, each in value.items()}
    return [finite(each) for each in value] if isinstance(value, list | tuple) else value


def label_text(value: object) -> str:
    """A label as text: text and numbers as they are written, anything else as JSON."""
    if isinstance(value, str):
        return value
    if isinstance(value, bool | dict | list):
        return json.dumps(value, ensure_ascii=False, default=str)
    return str(value)


class RewardText:
    """Writes a reward into prompts as `data.reward_template` says; null leaves them as they are."""

    def __init__(self, template: str) -> None:
        if not says_reward(template):
            raise UserError(
                f"data.reward_template={template!r} must have {{prompt}} once and {{reward}}, e.g. "
                "'{prompt} <rm_score>: {reward:.2f} '; double other braces"
            )
        self.template = template

    def prompt(self, text: str, reward: float | None) -> str:
        """A prompt of text."""
        return text if reward is None else with_reward(self.template, text, reward)

    def messages(self, messages: list[Message], reward: float | None, row: Row) -> list[Message]:
        """A conversation: its last user message carries the reward."""
        if reward is None:
            return messages
        place = max((index for index, message in enumerate(messages) if message["role"] == "user"), default=None)
        if place is None or not isinstance(text := messages[place]["content"], str):
            raise RowError(row.where, "the prompt has no user message of text that could carry the reward")
        carrier = {**messages[place], "content": self.prompt(text, reward)}
        return [*messages[:place], carrier, *messages[place + 1 :]]
