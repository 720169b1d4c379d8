"""A trained model as an HF folder, written by the main rank while every rank gathers."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from rlhf_suite.models.prompt_format import PromptFormat
from rlhf_suite.models.save import Extras, save_hf
from rlhf_suite.models.weights import weights_on_cpu
from rlhf_suite.train.strategy import TrainedModel


def export(
    model: TrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    path: Path,
    extras: Extras = dict,
    prompts: PromptFormat | None = None,
) -> list[str]:
    """Write the model, LoRA adapters merged into its weights. Every rank calls it, and every rank computes `extras`
    (those of `save_hf`). Return a sentence for each part that the folder lacks."""
    main, once = model.world.is_main, Once(extras)
    weights = weights_on_cpu(model.module, model.gather, keep=main)
    try:
        if not main:
            return []
        return save_hf(model.module, tokenizer, path, state_dict=weights, extras=once, prompts=prompts)
    finally:  # the ranks stay together, whatever the main one could not write
        with suppress(Exception):
            once()
        model.world.barrier()


class Once:
    """What `compute` returns or raises, computed when it is first called."""

    def __init__(self, compute: Extras) -> None:
        self.compute = compute
        self.values: Mapping[str, Any] | None = None
        self.error: Exception | None = None

    def __call__(self) -> Mapping[str, Any]:
        if self.values is None and self.error is None:
            try:
                self.values = self.compute()
            except Exception as error:
                self.error = error
        if self.error is not None:
            raise self.error
        assert self.values is not None
        return self.values
