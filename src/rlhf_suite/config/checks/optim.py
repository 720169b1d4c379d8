"""Rules of one trained model, for the actor and the critic alike."""

from __future__ import annotations

import re
from collections.abc import Iterator

from rlhf_suite.config.ds import DeepSpeedConfig
from rlhf_suite.config.optim import TrainedModelConfig
from rlhf_suite.config.problems import Problem


def muon_fits(name: str, section: TrainedModelConfig, ds: DeepSpeedConfig) -> Iterator[Problem]:
    """Muon takes whole matrices, and DeepSpeed clips what it has orthogonalised already."""
    if section.optim != "muon":
        return
    if ds.lora.rank > 0:
        what = "muon orthogonalises whole weight matrices, LoRA trains factors of them"
        yield Problem(f"{name}.optim", what, f"write {name}.optim=adam, or ds.lora.rank=0")
    if section.max_norm > 0:
        what = f"{section.max_norm:g} would clip the orthogonalised update of muon, not the gradient"
        yield Problem(f"{name}.max_norm", what, f"add {name}.max_norm=0")


def frozen_names_fit(name: str, section: TrainedModelConfig, ds: DeepSpeedConfig) -> Iterator[Problem]:
    key = f"{name}.freeze"
    if section.freeze and ds.lora.rank > 0:
        what = "LoRA trains its adapters alone, everything else is frozen already"
        yield Problem(key, what, "leave it away, and choose with ds.lora.target_modules")
    for pattern in section.freeze:
        try:
            re.compile(pattern)
        except re.error as error:
            yield Problem(key, f"{pattern!r} is no regular expression: {error}", f"write '{key}=[model.embed_tokens]'")


def experts_keep_their_gradient(name: str, section: TrainedModelConfig) -> Iterator[Problem]:
    """Re-entrant checkpointing hands the router's logits out without a gradient."""
    if section.aux_loss_coef > 0 and section.gradient_checkpointing_enable and section.gradient_checkpointing_reentrant:
        what = f"{name}.aux_loss_coef would have no effect: re-entrant checkpointing keeps no gradient of the router"
        key = f"{name}.gradient_checkpointing_reentrant"
        yield Problem(key, what, f"write {key}=false")
