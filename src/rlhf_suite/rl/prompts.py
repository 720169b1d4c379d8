"""The prompts of a run: those it trains on, and the held-out ones it is measured by."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rlhf_suite.config.runs import PPORun
from rlhf_suite.data.chat import Prompt, PromptEncoder
from rlhf_suite.data.load import Loader
from rlhf_suite.data.rows import EVAL, PROMPTS, BadRows, Sources

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True)
class Prompts:
    """Encoded prompts, and what to tell the user about rows that could not be used."""

    train: Sequence[Prompt]
    held_out: Sequence[Prompt]
    notes: str


def load_prompts(config: PPORun, tokenizer: PreTrainedTokenizerBase) -> Prompts:
    """Read and encode all rows of data.prompt_dataset and eval.dataset."""
    data, seed = config.data, config.train.seed
    assert data.prompt_dataset is not None
    bad = BadRows(data.on_bad_row)
    loader = Loader(PromptEncoder(tokenizer, data), data, seed, bad)
    sources = Sources(data.prompt_dataset, data.prompt_split, data.max_samples, data.prompt_probs, PROMPTS)
    train = loader.load(sources)
    held_out: Sequence[Prompt] = []
    if config.eval.dataset is not None:
        sources = Sources(config.eval.dataset, config.eval.split, config.eval.max_samples, flags=EVAL)
        held_out = loader.load(sources)
    return Prompts(train, held_out, bad.summary())
