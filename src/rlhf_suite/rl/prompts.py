"""The prompts of a run: those it trains on, and the held-out ones it is measured by."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from rlhf_suite.config.runs import PPORun
from rlhf_suite.data.chat import Prompt, PromptEncoder
from rlhf_suite.data.encode import encode_rows
from rlhf_suite.data.rows import EVAL, PROMPTS, BadRows, load_rows

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True)
class Prompts:
    """Encoded prompts, and what to tell the user about rows that could not be used."""

    train: list[Prompt]
    held_out: list[Prompt]
    notes: str


def load_prompts(config: PPORun, tokenizer: PreTrainedTokenizerBase) -> Prompts:
    """Read and encode all rows of data.prompt_dataset and eval.dataset."""
    data, seed = config.data, config.train.seed
    assert data.prompt_dataset is not None
    bad, encoder = BadRows(data.on_bad_row), PromptEncoder(tokenizer, data)
    rows = load_rows(
        data.prompt_dataset,
        split=data.prompt_split,
        probs=data.prompt_probs,
        max_samples=data.max_samples,
        seed=seed,
        bad=bad,
        flags=PROMPTS,
    )
    train = encode_rows(encoder, rows, bad, data.dataloader_num_workers)
    held_out: list[Prompt] = []
    if config.eval.dataset is not None:
        limit = config.eval.max_samples
        rows = load_rows(
            config.eval.dataset, split=config.eval.split, probs=None, max_samples=limit, seed=seed, bad=bad, flags=EVAL
        )
        held_out = encode_rows(encoder, rows, bad, data.dataloader_num_workers)
    return Prompts(train, held_out, bad.summary())
