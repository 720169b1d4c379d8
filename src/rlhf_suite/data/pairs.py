"""Rows with a better and a worse answer to the same prompt, as two sequences that stay together."""

from __future__ import annotations

from dataclasses import replace
from os.path import commonprefix
from typing import TYPE_CHECKING

from rlhf_suite.config.data import PairDataConfig, SFTDataConfig
from rlhf_suite.data.batch import Example, Group
from rlhf_suite.data.chat import ConversationEncoder, answer_config
from rlhf_suite.data.render import text_of
from rlhf_suite.data.row import LeftOut, Row, RowError, number

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

PROMPT = "the common beginning"  # the name of a column that rows without data.prompt_key are given


class PairEncoder:
    """Rows to (chosen, rejected), each encoded as supervised tuning would encode that answer."""

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, config: PairDataConfig, margin_key: str | None = None
    ) -> None:
        self.config, self.margin_key = config, margin_key
        self.chosen, self.rejected = (
            ConversationEncoder(tokenizer, self.answer_config(key)) for key in (config.chosen_key, config.rejected_key)
        )

    def answer_config(self, key: str) -> SFTDataConfig:
        """How the answer in column `key` is encoded."""
        if self.config.prompt_key is not None:
            return answer_config(self.config, self.config.prompt_key, key)
        if self.config.apply_chat_template or self.config.turn_markers is not None:  # the last turn is the answer
            return answer_config(self.config, key, None)
        return answer_config(replace(self.config, input_template=None), PROMPT, key)

    def encode(self, row: Row) -> Group:
        """RowError where the two are one and the same, also if only after the cut at data.max_len."""
        if self.chosen.config.input_key == PROMPT:
            row = self.split(row)
        pair = tuple(encoder.answer(row) for encoder in (self.chosen, self.rejected))
        if prompt_ids(pair[0]) != prompt_ids(pair[1]):
            raise RowError(row.where, "the two conversations differ before their last answers")
        if pair[0].ids == pair[1].ids:
            after = " after the cut at data.max_len" if pair[0].truncated else ""
            raise LeftOut(row.where, f"the chosen and the rejected answer are the same{after}")
        if self.margin_key is None:
            return Group(pair)
        margin = number(row, self.margin_key)
        return Group(tuple(replace(example, numbers={"margin": margin}) for example in pair))

    def split(self, row: Row) -> Row:
        """The row with what both texts begin with as its prompt, up to the end of a word. Answer tokens that are alike
        in both cancel out of losses over summed log-probs, so the place of the border does not matter to those."""
        keys = (self.config.chosen_key, self.config.rejected_key)
        chosen, rejected = (text_of(row, key) for key in keys)
        common = commonprefix([chosen, rejected])
        while common and not common[-1].isspace():
            common = common[:-1]
        common = common.rstrip(" ")  # which begins the next word in most vocabularies
        if not common.strip():
            raise RowError(row.where, "the two texts have no beginning in common; name the prompt with data.prompt_key")
        answers = {key: text[len(common) :] for key, text in zip(keys, (chosen, rejected), strict=True)}
        return Row({**row.values, PROMPT: common, **answers}, row.source, row.line)


def prompt_ids(example: Example) -> list[int]:
    """What comes before the first token that is trained on."""
    return example.ids[: example.mask.index(1)]
