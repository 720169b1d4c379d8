"""Columns of a row to text, text to token ids, and the reward that conditional SFT writes into prompts."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from rlhf_suite.config.declarations.data import DataConfig, with_reward
from rlhf_suite.data.messages import Message, not_blank
from rlhf_suite.data.row import HALF, Row, RowError, join_columns, require_value
from rlhf_suite.errors import UserError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

CONTEXT = 64  # characters before a text that its first token may depend on
NUM_EMBEDDINGS = "num_embeddings"  # attribute of a tokenizer that has more tokens than its model has rows
STARTS = ("\n", ":", "a", ")", "\u3002")  # texts of which one does not become one token with what follows


def check_rendering(tokenizer: PreTrainedTokenizerBase, config: DataConfig) -> None:
    """Check that prompts can be rendered; rules have checked the template of data.input_template.

    Raises:
        UserError: there is no chat template where one is asked for.
    """
    if config.apply_chat_template and tokenizer.chat_template is None:
        raise UserError(
            "data.apply_chat_template=true: the tokenizer has no chat template; set data.tokenizer_chat_template"
        )


def begin_ids(tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Return [begin-of-sequence id] if the tokenizer adds this token to a text by itself, else []."""
    begin = tokenizer.bos_token_id
    return [begin] if begin is not None and tokenizer("a")["input_ids"][0] == begin else []


class NoEmbedding(RowError):
    """A text has a token that its model has no embedding of."""


def tokens(tokenizer: PreTrainedTokenizerBase, text: str, begin: Sequence[int] = ()) -> list[int]:
    """Return the ids of `text`, after `begin` unless the text begins with it already.

    Raises:
        NoEmbedding: the model has no row for one of them, as `load_tokenizer` knows.
        RowError: the text has half of a surrogate pair.
    """
    try:
        ids = list(tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])
    except (TypeError, UnicodeEncodeError):  # raised for a text that is not Unicode, or for one that is no text
        if is_unicode(text):
            raise
        raise RowError("", HALF) from None
    rows = getattr(tokenizer, NUM_EMBEDDINGS, None)
    if rows is not None and ids and max(ids) >= rows:
        token = tokenizer.convert_ids_to_tokens(max(ids))
        raise NoEmbedding("", f"the model has no embedding for the token {token!r} ({max(ids)}; it has {rows})")
    return ids if ids[: len(begin)] == list(begin) else [*begin, *ids]


def is_unicode(text: str) -> bool:
    """Return whether a text has no half of a surrogate pair."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def pieces(tokenizer: PreTrainedTokenizerBase, texts: Sequence[str], begin: Sequence[int] = ()) -> list[list[int]]:
    """Return the ids of texts that follow each other, the first as it is alone and the others as they are after it."""
    result, before = list[list[int]](), ""
    for text in texts:
        result.append(encode_after(tokenizer, before, text) if result else tokens(tokenizer, text, begin))
        before = text if len(text) >= CONTEXT else before + text
    return result


def encode_after(tokenizer: PreTrainedTokenizerBase, before: str, text: str) -> list[int]:
    """Return the ids that `text` adds to the ids of `before`, after which it stands.

    Alone it might have others: many tokenizers put a space in front of a text. Where a token of the whole text would
    reach over the border, `before` keeps its ids, and `text` has those of a text that goes on without a space.
    """
    if not text:
        return []
    for context in (before, *STARTS) if before else STARTS:
        known, whole = tokens(tokenizer, context), tokens(tokenizer, context + text)
        if whole[: len(known)] == known:
            return whole[len(known) :]
    return tokens(tokenizer, text)


def fill(input_template: str | None, prompt: str) -> str:
    """Return the prompt inserted into its template."""
    return prompt if input_template is None else input_template.format(prompt)


def text_of(row: Row, key: str) -> str:
    """Return the text in column `key`, or in a comma list of columns.

    Raises:
        RowError: the column has no text, or the text is blank.
    """
    value = join_columns(row, key)
    if isinstance(value, list):
        raise RowError(row.where, f"column {key!r} is a list: message lists need data.apply_chat_template=true")
    if not isinstance(value, str):
        raise RowError(row.where, f"column {key!r} is of type {type(value).__name__}, not text")
    return not_blank(value, key, row)


def columns_text(row: Row, names: Sequence[str]) -> str:
    """Return columns of a row as a JSON object in text. Values that JSON does not know become text; NaN and infinity,
    null."""
    values = {name: row.values[name] if name in row.values else require_value(row, name) for name in names}
    return json.dumps(finite(values), ensure_ascii=False, default=str)


def finite(value: object) -> object:
    """Return the value with None for every NaN and infinity, which JSON does not have."""
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, dict):
        return {str(name): finite(item) for name, item in value.items()}
    return [finite(item) for item in value] if isinstance(value, list | tuple) else value


def label_text(value: object) -> str:
    """Return a label as text: text and numbers as they are written, anything else as JSON."""
    if isinstance(value, str):
        return value
    if isinstance(value, bool | dict | list):
        return json.dumps(value, ensure_ascii=False, default=str)
    return str(value)


class RewardText:
    """Writes rewards into prompts with `data.reward_template`, for reward-conditioned SFT.

    The model learns what responses of every reward look like. Asked for a high reward, it gives responses that are
    better than the mean of its data (Decision Transformer, Chen et al. 2021; SteerLM, Dong et al. 2023).
    """

    def __init__(self, template: str) -> None:
        self.template = template  # a rule has looked at it

    def prompt(self, text: str, reward: float | None) -> str:
        """Return the prompt text with the reward, or unchanged if `reward` is None."""
        return text if reward is None else with_reward(self.template, text, reward)

    def messages(self, messages: list[Message], reward: float | None, row: Row) -> list[Message]:
        """Return the conversation with the reward in its last user message, or unchanged if `reward` is None."""
        if reward is None:
            return messages
        place = max((index for index, message in enumerate(messages) if message["role"] == "user"), default=None)
        if place is None or not isinstance(text := messages[place]["content"], str):
            raise RowError(
                row.where, "the prompt has no user message with text, into which the reward could be written"
            )
        carrier = {**messages[place], "content": self.prompt(text, reward)}
        return [*messages[:place], carrier, *messages[place + 1 :]]
