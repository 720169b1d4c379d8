"""Optimiser and schedule of one trained model; the shared part of `actor` and `critic`."""

from __future__ import annotations

from dataclasses import dataclass

from rlhf_suite import registry
from rlhf_suite.config.flags import FIXED, flag, group, is_one_of, is_true

DISABLE_DROPOUT = "Train without the dropout that the model's own configuration asks for; LoRA has ds.lora.dropout"


@dataclass
class AdamConfig:
    """AdamW"""

    lr: float = flag(1e-6, "Peak learning rate; with optim=muon the rate of the parameters Muon does not take", ge=0)
    betas: list[float] = flag([0.9, 0.95], "Decay rates of the two moments", ge=0, lt=1)
    eps: float = flag(1e-8, "Added to the denominator", gt=0)
    weight_decay: float = flag(0.0, "Decoupled weight decay; biases and norms are exempt", ge=0)


@dataclass
class MuonConfig:
    """Muon: orthogonalised momentum for matrices; embeddings, heads and vectors use AdamW"""

    lr: float = flag(0.02, "Peak learning rate of the Muon group", ge=0)
    momentum: float = flag(0.95, "Momentum", ge=0, lt=1)


@dataclass
class TrainedModelConfig:
    """A model that is trained: where it starts, how it is optimised, on how many ranks"""

    model_name_or_path: str | None = flag(None, "HF folder or hub name, or builtin:<name>")
    num_nodes: int = flag(1, "Nodes of this model's worker group", ge=1, resume=FIXED)
    num_gpus_per_node: int = flag(
        1, "Ranks per node: GPUs, or CPU processes on a machine without GPUs", ge=1, resume=FIXED
    )
    optim: str = flag("adam", "Optimiser", choices=("adam", "muon"), resume=FIXED)
    adam: AdamConfig = group(AdamConfig)
    muon: MuonConfig = group(MuonConfig, when=is_one_of(".optim", "muon"))
    lr_scheduler: str = flag("cosine_with_min_lr", "Learning-rate schedule", algorithms=registry.schedule)
    lr_warmup_ratio: float = flag(0.03, "Share of the optimiser steps spent warming up", ge=0, le=1)
    min_lr_ratio: float = flag(0.1, "Final over peak rate", ge=0, le=1)
    lr_cycles: int = flag(1, "How often the rate falls from the peak", ge=1)
    lr_decay_ratio: float = flag(0.1, "Share of the optimiser steps at the end in which the rate falls", gt=0, le=1)
    max_norm: float = flag(1.0, "Global gradient-norm clip; 0 switches clipping off", ge=0)
    freeze: list[str] = flag(
        [], "Modules or parameters that are not trained, as regular expressions of their whole names", resume=FIXED
    )
    disable_dropout: bool = flag(True, DISABLE_DROPOUT)
    aux_loss_coef: float = flag(0.0, "Weight of the MoE load-balancing loss; 0 switches it off", ge=0)
    gradient_checkpointing_enable: bool = flag(False, "Recompute activations in the backward pass")
    gradient_checkpointing_reentrant: bool = flag(
        False, "Use the re-entrant variant of checkpointing", when=is_true(".gradient_checkpointing_enable")
    )
