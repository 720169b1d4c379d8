"""A trained model as an HF folder, written by the main rank while every rank gathers."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from rlhf_suite.models.save import save_hf
from rlhf_suite.models.weights import weights_on_cpu
from rlhf_suite.train.strategy import TrainedModel


def export(
    model: TrainedModel, tokenizer: PreTrainedTokenizerBase, path: Path, extras: Mapping[str, Any] | None = None
) -> None:
    """Every rank calls it. LoRA adapters are merged into the weights. `extras` as for `save_hf`."""
    main = model.world.is_main
    weights = weights_on_cpu(model.module, model.gathered, keep=main)
    if main:
        save_hf(model.module, tokenizer, path, state_dict=weights, extras=extras)
    model.world.barrier()
