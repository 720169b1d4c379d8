"""Raw text for continued pre-training: documents as windows of at most data.max_len tokens."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rlhf_suite.config.data import SFTDataConfig
from rlhf_suite.data.batch import Example
from rlhf_suite.data.render import begin_ids, text_of, tokens
from rlhf_suite.data.row import Row, RowError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class DocumentEncoder:
    """Rows to windows of text, without template or end-of-sequence token. Every token but the document's first is
    trained on exactly once: a window begins with the last token of the one before it, as context."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, config: SFTDataConfig) -> None:
        self.tokenizer, self.config, self.begin = tokenizer, config, begin_ids(tokenizer)

    def encode(self, row: Row) -> list[Example]:
        ids = tokens(self.tokenizer, text_of(row, self.config.input_key), self.begin)
        if len(ids) < 2:
            raise RowError(row.where, "a text of one token has nothing to predict")
        length = self.config.max_len
        windows = [ids[start : start + length] for start in range(0, len(ids) - 1, length - 1)]
        return [Example(window, [0] + [1] * (len(window) - 1), row.where) for window in windows]
