"""Preference data: pairs of a better and a worse response, and single responses that are labelled good or bad."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from hashlib import sha256
from os.path import commonprefix
from typing import TYPE_CHECKING

import numpy as np

from rlhf_suite.config.declarations.data import DataConfig
from rlhf_suite.data.batch import Example, Group, Item, sequences
from rlhf_suite.data.combine import LazySequence
from rlhf_suite.data.images import ImageReader
from rlhf_suite.data.render import text_of
from rlhf_suite.data.row import LeftOut, Row, RowError, boolean, number
from rlhf_suite.data.text_encoders import ConversationEncoder, build_sft_config, cut
from rlhf_suite.errors import UserError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


PROMPT = "the common beginning"  # the column for the prompt of rows without data.prompt_key


class PairEncoder:
    """Encodes rows as (chosen, rejected), each response as supervised tuning would encode it."""

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        config: DataConfig,
        margin_key: str | None = None,
        reader: ImageReader | None = None,
    ) -> None:
        self.config, self.margin_key = config, margin_key
        self.chosen, self.rejected = (
            ConversationEncoder(tokenizer, self.build_sft_config(key), reader)
            for key in (config.column("chosen_key"), config.column("rejected_key"))
        )

    def build_sft_config(self, key: str) -> DataConfig:
        """Return the configuration that encodes the response in column `key`."""
        if self.config.prompt_key is not None:
            return build_sft_config(self.config, self.config.prompt_key, key)
        if self.config.apply_chat_template or self.config.turn_markers is not None:  # the last turn is the response
            return build_sft_config(self.config, key, None)
        return build_sft_config(replace(self.config, input_template=None), PROMPT, key)

    def encode(self, row: Row) -> Group:
        """Return the pair of a row.

        Raises:
            LeftOut: the two responses are the same, or are the same after the cut at data.max_len.
            RowError: the two prompts differ, or a response cannot be encoded.
        """
        if self.chosen.config.input_key == PROMPT:
            row = self.split(row)
        pair = tuple(encoder.encode_last_response(row) for encoder in (self.chosen, self.rejected))
        if prompt_ids(pair[0]) != prompt_ids(pair[1]):
            raise RowError(row.where, "the two conversations differ before their last responses")
        if pair[0].ids == pair[1].ids:
            after = " after the cut at data.max_len" if pair[0].truncated else ""
            raise LeftOut(row.where, f"the chosen and the rejected response are the same{after}")
        if self.margin_key is None:
            return Group(pair)
        margin = number(row, self.margin_key)
        return Group(tuple(replace(example, numbers={"margin": margin}) for example in pair))

    def split(self, row: Row) -> Row:
        """Return the row with the common beginning of both texts, up to the end of a word, as its prompt.

        Response tokens that are equal in both cancel out of losses over summed log-probs, so these losses do not depend
        on where exactly the prompt ends.
        """
        keys = (self.config.column("chosen_key"), self.config.column("rejected_key"))
        chosen, rejected = (text_of(row, key) for key in keys)
        common = commonprefix([chosen, rejected])
        while common and not common[-1].isspace():
            common = common[:-1]
        common = common.rstrip(" ")  # in most vocabularies the space is a part of the next word's token
        if not common.strip():
            raise RowError(row.where, "the two texts have no beginning in common; name the prompt with data.prompt_key")
        responses = {key: text[len(common) :] for key, text in zip(keys, (chosen, rejected), strict=True)}
        return Row({**row.values, PROMPT: common, **responses}, row.source, row.line)


def prompt_ids(example: Example) -> list[int]:
    """Return the tokens before the first one that is trained on."""
    return example.ids[: example.mask.index(1)]


class LabelledEncoder:
    """Encodes rows as responses whose number `label` is 1 (desirable) or 0: one per labelled row, two per pair."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, config: DataConfig) -> None:
        self.config, self.encoder = config, response_encoder(tokenizer, config)

    def encode(self, row: Row) -> Example | list[Example]:
        """Return the response of a labelled row, or both responses of a pair.

        Raises:
            RowError: the row cannot be used, with the reason.
        """
        if isinstance(self.encoder, PairEncoder):
            chosen, rejected = self.encoder.encode(row).examples
            return [replace(chosen, numbers={"label": 1.0}), replace(rejected, numbers={"label": 0.0})]
        label = boolean(row, self.config.column("label_key"))
        return replace(self.encoder.encode_last_response(row), numbers={"label": float(label)})


def response_encoder(tokenizer: PreTrainedTokenizerBase, config: DataConfig) -> PairEncoder | ConversationEncoder:
    """Return the encoder of the responses: pairs as in `task=dpo`, single responses as in `task=sft`."""
    if config.chosen_key is None or config.rejected_key is None:
        return ConversationEncoder(tokenizer, build_sft_config(config, config.input_key, config.output_key))
    return PairEncoder(tokenizer, config)


class MismatchedPairs(LazySequence[Group]):
    """Each example together with a mismatched one: its prompt with the response to another prompt.

    The response is that of the next example with another prompt. So pairs depend on the data alone, and neither on the
    micro-batches nor on the ranks. A pair is built when it is read.
    """

    def __init__(self, examples: Sequence[Item], max_len: int) -> None:
        self.examples, self.max_len = examples, max_len
        digests = (sha256(repr(prompt_ids(self.example(row))).encode()).digest() for row in range(len(examples)))
        prompts = np.fromiter((int.from_bytes(digest[:8], signed=True) for digest in digests), np.int64, len(examples))
        if (prompts == prompts[0]).all():
            raise UserError(
                "all rows have the same prompt, but the KL reference point needs responses to other prompts"
            )
        # The last row of each run of rows with one prompt; the row after it (after the last, the first) is the next.
        ends = np.flatnonzero(prompts != np.roll(prompts, -1))
        self.following = (ends[np.searchsorted(ends, np.arange(len(prompts))) % len(ends)] + 1) % len(prompts)

    def __len__(self) -> int:
        return len(self.examples)

    def at(self, place: int) -> Group:
        example, other = self.example(place), self.example(int(self.following[place]))
        changed = swap_response(example, other, len(prompt_ids(example)), len(prompt_ids(other)))
        return Group((example, cut(changed, self.max_len)))

    def example(self, row: int) -> Example:
        """Return the example in row `row`."""
        return sequences(self.examples[row])[0]


def swap_response(example: Example, other: Example, prompt: int, other_prompt: int) -> Example:
    """Return the first `prompt` tokens of `example` with the response of `other`, which begins at `other_prompt`."""
    response = slice(other_prompt, None)
    ids, mask = example.ids[:prompt] + other.ids[response], example.mask[:prompt] + other.mask[response]
    return replace(example, ids=ids, mask=mask, truncated=False)
