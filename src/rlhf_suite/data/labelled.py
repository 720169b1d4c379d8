"""Answers with a label, and for each the same prompt with an answer that was given to another."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from rlhf_suite.config.data import LabelledDataConfig
from rlhf_suite.data.batch import Example, Group
from rlhf_suite.data.chat import ConversationEncoder, answer_config, cut
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


def with_mismatched(examples: Sequence[Example], max_len: int) -> list[Group]:
    """Each example, and its prompt with the answer of the next example that has another prompt.

    What is paired depends on the data alone, so neither on micro-batches nor on ranks.
    """
    prompts = [tuple(prompt_ids(example)) for example in examples]
    if len(set(prompts)) < 2:
        raise UserError("all rows have the same prompt, but the KL reference point needs answers to other prompts")
    following = [0] * len(examples)
    for index in range(2 * len(examples) - 2, -1, -1):  # twice around: the last row looks at the first
        row, after = index % len(examples), (index + 1) % len(examples)
        following[row] = after if prompts[after] != prompts[row] else following[after]
    return [
        Group((example, cut(mismatched(example, examples[other], len(prompt), len(prompts[other])), max_len)))
        for example, other, prompt in zip(examples, following, prompts, strict=True)
    ]


def mismatched(example: Example, other: Example, prompt: int, other_prompt: int) -> Example:
    """The prompt of one (its first `prompt` tokens) with the answer of the other."""
    answer = slice(other_prompt, None)
    ids, mask = example.ids[:prompt] + other.ids[answer], example.mask[:prompt] + other.mask[answer]
    return replace(example, ids=ids, mask=mask, truncated=False)
