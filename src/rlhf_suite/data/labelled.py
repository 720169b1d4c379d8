"""Answers with a label, and for each the same prompt with an answer that was given to another."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from hashlib import sha256
from typing import TYPE_CHECKING

import numpy as np

from rlhf_suite.config.data import LabelledDataConfig
from rlhf_suite.data.batch import Example, Group, Item, sequences
from rlhf_suite.data.chat import ConversationEncoder, answer_config, cut
from rlhf_suite.data.lazy import Lazy
from rlhf_suite.data.pairs import prompt_ids
from rlhf_suite.data.row import Row, RowError, number
from rlhf_suite.errors import UserError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class LabelledEncoder:
    """Rows to answers, encoded as supervised tuning would, whose number `label` is 1 (desirable) or 0."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, config: LabelledDataConfig) -> None:
        self.config = config
        self.conversation = ConversationEncoder(tokenizer, answer_config(config, config.input_key, config.output_key))

    def encode(self, row: Row) -> Example:
        label = number(row, self.config.label_key)
        if label not in (0, 1):
            raise RowError(row.where, f"column {self.config.label_key!r} is neither 1 (desirable) nor 0 (undesirable)")
        return replace(self.conversation.encode(row), numbers={"label": label})


class WithMismatched(Lazy[Group]):
    """Each example, and its prompt with the answer of the next example that has another prompt; put together when asked
    for. What is paired depends on the data alone, so neither on micro-batches nor on ranks."""

    def __init__(self, examples: Sequence[Item], max_len: int) -> None:
        self.examples, self.max_len = examples, max_len
        digests = (sha256(repr(prompt_ids(self.example(row))).encode()).digest() for row in range(len(examples)))
        prompts = np.fromiter((int.from_bytes(digest[:8], signed=True) for digest in digests), np.int64, len(examples))
        if (prompts == prompts[0]).all():
            raise UserError("all rows have the same prompt, but the KL reference point needs answers to other prompts")
        # The last row of each run of rows with one prompt; the row behind it, the first behind the last, is the next.
        ends = np.flatnonzero(prompts != np.roll(prompts, -1))
        self.following = (ends[np.searchsorted(ends, np.arange(len(prompts))) % len(ends)] + 1) % len(prompts)

    def __len__(self) -> int:
        return len(self.examples)

    def at(self, place: int) -> Group:
        example, other = self.example(place), self.example(int(self.following[place]))
        changed = mismatched(example, other, len(prompt_ids(example)), len(prompt_ids(other)))
        return Group((example, cut(changed, self.max_len)))

    def example(self, row: int) -> Example:
        return sequences(self.examples[row])[0]


def mismatched(example: Example, other: Example, prompt: int, other_prompt: int) -> Example:
    """The prompt of one (its first `prompt` tokens) with the answer of the other."""
    answer = slice(other_prompt, None)
    ids, mask = example.ids[:prompt] + other.ids[answer], example.mask[:prompt] + other.mask[answer]
    return replace(example, ids=ids, mask=mask, truncated=False)
