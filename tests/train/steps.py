"""Optimiser steps on real ranks, for the tests of the step, the optimisers and the checkpoints."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from gradients import with_mesh
from plain_models import LORA
from policy_formulas import NextToken, policy

from rlhf_suite.config.declarations.ds import DeepSpeedConfig, LoRAConfig
from rlhf_suite.config.declarations.models import AdamConfig, MuonConfig, TrainedModelConfig
from rlhf_suite.config.plan.run_plan import ModelPlan
from rlhf_suite.data.batch import TokenBatch, take
from rlhf_suite.data.packing import micro_batches
from rlhf_suite.distributed.mesh import Mesh
from rlhf_suite.distributed.world import World
from rlhf_suite.errors import RunError
from rlhf_suite.models.weights import weights_on_cpu
from rlhf_suite.rl.sharding import balanced_parts, shards
from rlhf_suite.train.step import optimizer_step
from rlhf_suite.train.strategy import TrainedModel, load_trained
from rlhf_suite.train.task import Forward, StepLoss


@dataclass(frozen=True)
class Setup:
    """A way to train the tiny model; `adam` by default, in fp32 and packed."""

    zero: int | None = 0  # None: without DeepSpeed
    dtype: str = "fp32"
    offload: bool = False
    cpu_adam: str = "torch"  # whose AdamW updates in host memory
    accumulate: str = "fp32"
    optim: str = "adam"
    lora: bool = False
    freeze: tuple[str, ...] = ()
    four_bits: bool = False
    max_norm: float = 1.0
    lr: float = 1e-2
    objective: str = "next token"
    on_nonfinite: str = "skip"
    overlap: bool | None = False
    compiled: bool = False  # by DeepCompile; its batches are padded
    leaves: tuple[str, ...] = ()  # the classes of modules that ZeRO-3 gathers as a whole
    whole: int | None = None  # parameters of at most so many numbers stay whole on the ranks of ZeRO-3
    tensor: int = 1  # ranks that split the matrices of each layer
    sleeps: bool = False  # whether the optimiser state is in host memory between steps

    def __str__(self) -> str:
        rare = {self.optim: self.optim != "adam", "offload": self.offload, "LoRA": self.lora}
        rare |= {f"by {self.cpu_adam}": self.cpu_adam != "torch"}
        rare |= {f"tensor {self.tensor}": self.tensor > 1, "overlap": self.overlap, "compiled": self.compiled}
        rare |= {"with whole parameters": self.whole is not None}
        words = [f"ZeRO-{self.zero}", self.dtype, *(word for word, on in rare.items() if on)]
        return " ".join(words) + (f", sums in {self.accumulate}" if self.accumulate != "fp32" else "")


@dataclass
class Outcome:
    """What every rank reports: the metrics of each step, the weights at the end, and why it stopped."""

    metrics: list[dict[str, float]] = field(default_factory=list)
    weights: dict[str, torch.Tensor] = field(default_factory=dict)
    error: str = ""


class InfiniteLoss(NextToken):
    """The loss of a micro-batch with sequence 4 is infinite, but its gradient is not."""

    def loss(self, model: Forward, batch: TokenBatch) -> StepLoss:
        right = super().loss(model, batch)
        extra = torch.inf if 4 in batch.index.tolist() and batch.mask.any() else 0.0
        return StepLoss({"tokens": right.sums["tokens"] + extra}, right.metrics)


OBJECTIVES = {"next token": NextToken(), "ppo": policy("token-mean"), "infinite": InfiniteLoss()}


def build(world: World, folder: Path, setup: Setup) -> TrainedModel:
    ds = DeepSpeedConfig.of(
        "sft",
        zero_stage=setup.zero,
        param_dtype=setup.dtype,
        adam_offload=setup.offload,
        cpu_adam=setup.cpu_adam,
        overlap_comm=setup.overlap,
        zero3_leaf_modules=list(setup.leaves),
        persistence_threshold=setup.whole,
        grad_accum_dtype=setup.accumulate,
        deepcompile=setup.compiled,
        packing_samples=not setup.compiled,
        load_in_4bit=setup.four_bits,
        tensor_parallel_size=setup.tensor,
        lora=LORA if setup.lora else LoRAConfig(),
    )
    config = TrainedModelConfig.of(
        "ppo",
        model_name_or_path=str(folder / "lm"),
        freeze=list(setup.freeze),
        optim=setup.optim,
        adam=AdamConfig(lr=setup.lr),
        muon=MuonConfig(lr=setup.lr),
        lr_scheduler="constant",
        max_norm=setup.max_norm,
    )
    if setup.tensor > 1:
        world = with_mesh(world, Mesh(world.mesh.size // setup.tensor, tensor=setup.tensor))
    return load_trained(ModelPlan("actor", config.model_name_or_path), config, ds, world, total_steps=9, seed=0)


def one_step(model: TrainedModel, batch: TokenBatch, step: int, setup: Setup) -> dict[str, float]:
    """Micro-batches of 3 of this rank's share of `batch`."""
    mine = shards(batch, balanced_parts(batch, model.world.mesh.data))[model.world.data_index]
    parts = [take(mine, group) for group in micro_batches(mine.lengths.tolist(), count=3)]
    return optimizer_step(model, OBJECTIVES[setup.objective], parts, step, setup.on_nonfinite)


def train(world: World, folder: Path, setup: Setup, batches: Sequence[TokenBatch | None]) -> Outcome:
    """Step i trains on batches[i]; none there: the step is left out."""
    torch.manual_seed(0)
    model, outcome = build(world, folder, setup), Outcome()
    if setup.sleeps:
        model.optimizer_to_host()
    try:
        for step, batch in enumerate(batches):
            if batch is not None:
                with model.optimizer_on_device() if setup.sleeps else nullcontext():
                    outcome.metrics.append(one_step(model, batch, step, setup))
    except RunError as error:
        outcome.error = str(error)
    outcome.weights = weights_on_cpu(model.module, model.gather)
    return outcome


def same(one: dict[str, Any], other: dict[str, Any]) -> bool:
    """Bit for bit."""
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)
