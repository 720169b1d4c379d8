"""The prompts of a run: those it trains on, and the held-out ones it is measured by."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import TYPE_CHECKING

from rlhf_suite.config.check.sources import metric_names
from rlhf_suite.config.declarations.data import DataConfig
from rlhf_suite.config.declarations.eval import EvalConfig
from rlhf_suite.data.combine import LazySequence
from rlhf_suite.data.images import ImageReader
from rlhf_suite.data.load import Loader, Shown, show_nothing
from rlhf_suite.data.row import BadRows
from rlhf_suite.data.sources import EVAL, PROMPTS, Sources, source_names
from rlhf_suite.data.text_encoders import Prompt, PromptEncoder

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True)
class Prompts:
    """Encoded prompts, and what to tell the user about rows that could not be used."""

    train: Sequence[Prompt]
    held_out: Sequence[Prompt]
    notes: str
    contents_digest: str  # of the files that the training prompts come from


class Numbered(LazySequence[Prompt]):
    """Prompts that know their place and the name of their source. `sources`: that of each, in metrics."""

    def __init__(self, prompts: Sequence[Prompt], sources: Sequence[str]) -> None:
        self.prompts = prompts
        self.sources = sources if len(set(sources)) > 1 else None

    def __len__(self) -> int:
        return len(self.prompts)

    def at(self, place: int) -> Prompt:
        return replace(self.prompts[place], index=place, source="" if self.sources is None else self.sources[place])


def load_prompts(  # noqa: PLR0913, PLR0917 - all that a prompt is made from
    data: DataConfig,
    evaluation: EvalConfig,
    seed: int,
    tokenizer: PreTrainedTokenizerBase,
    keeps_chat: bool = False,
    reader: ImageReader | None = None,
    shown: Shown = show_nothing,
) -> Prompts:
    """Read and encode all rows of data.prompt_dataset and eval.dataset. `keeps_chat`: with their messages, for
    agents; `reader`: of images; `shown` may show how many are encoded."""
    assert data.prompt_dataset is not None
    bad = BadRows(data.on_bad_row)
    loader = Loader(PromptEncoder(tokenizer, data, keeps_chat, reader), data, seed, bad, shown)
    sources = Sources(data.prompt_dataset, data.prompt_split, data.max_samples, data.prompt_probs, PROMPTS)
    train, train_sources = loader.load_with_names(sources)
    contents_digest = loader.contents_digest
    sets: list[Sequence[Prompt]] = []
    names = source_names(evaluation.dataset or "")
    for source, columns in zip(names, evaluation.columns_of_sets(len(names)), strict=True):
        sources = Sources(source, evaluation.split, evaluation.max_samples, flags=EVAL)
        own = replace(data, **columns, teacher_prompt_key=None)  # nobody teaches in an evaluation
        encoder = PromptEncoder(tokenizer, own, keeps_chat, reader)
        sets.append(replace(loader, encoder=encoder).load(sources))
    held_out_sources = [name for name, part in zip(metric_names(names), sets, strict=True) for _ in part]
    held_out = list(Numbered([*chain.from_iterable(sets)], held_out_sources))
    return Prompts(Numbered(train, train_sources), held_out, bad.summary(), contents_digest)
