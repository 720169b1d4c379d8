"""Labelled answers, single or of pairs, and for each the same prompt with an answer that was given to another."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields, replace
from hashlib import sha256
from typing import TYPE_CHECKING

import numpy as np

from rlhf_suite.config.data import LabelledDataConfig, PairDataConfig
from rlhf_suite.data.batch import Example, Group, Item, sequences
from rlhf_suite.data.chat import ConversationEncoder, answer_config, cut
from rlhf_suite.data.lazy import Lazy
from rlhf_suite.data.pairs import PairEncoder, prompt_ids
from rlhf_suite.data.row import Row, truth
from rlhf_suite.errors import UserError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class LabelledEncoder:
    """Rows to answers, encoded as supervised tuning would, whose number `label` is 1 (desirable) or 0: one for a row
    with a label, two for a pair."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, config: LabelledDataConfig) -> None:
        self.config, self.encoder = config, answer_encoder(tokenizer, config)

    def encode(self, row: Row) -> Example | list[Example]:
        """RowError says why the row cannot be used."""
        if isinstance(self.encoder, PairEncoder):
            chosen, rejected = self.encoder.encode(row).examples
            return [replace(chosen, numbers={"label": 1.0}), replace(rejected, numbers={"label": 0.0})]
        label = truth(row, self.config.label_key)
        return replace(self.encoder.answer(row), numbers={"label": float(label)})


def answer_encoder(tokenizer: PreTrainedTokenizerBase, config: LabelledDataConfig) -> PairEncoder | ConversationEncoder:
    """What encodes the answers: pairs as `task=dpo` does, single ones as `task=sft`."""
    if config.chosen_key is None or config.rejected_key is None:
        return ConversationEncoder(tokenizer, answer_config(config, config.input_key, config.output_key))
    shared = {field.name: getattr(config, field.name) for field in fields(PairDataConfig)}
    return PairEncoder(tokenizer, PairDataConfig(**shared))


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
