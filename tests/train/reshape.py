"""A run that is saved on some ranks at some ZeRO stage and goes on at others; what it is compared with.

`python benchmarks/resume_matrix.py` goes from every shape to every other and writes docs/resume.md.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state
from steps import Setup, build, one_step

from rlhf_suite.data.trajectory import Experience
from rlhf_suite.distributed.world import World
from rlhf_suite.models.weights import weights_on_cpu
from rlhf_suite.train.ema import WeightAverage
from rlhf_suite.train.parts import base_state
from rlhf_suite.train.settings import is_plain
from rlhf_suite.train.strategy import TrainedModel

BEFORE, AFTER = 3, 3  # optimiser steps before the run is saved, and after it
BETA = 0.75


@dataclass
class Whole:
    """A run: weights, moments and moving average when it was saved or loaded; weights and metrics after more steps."""

    state: dict[str, torch.Tensor] = field(default_factory=dict)
    weights: dict[str, torch.Tensor] = field(default_factory=dict)
    metrics: list[dict[str, float]] = field(default_factory=list)


def whole_state(model: TrainedModel, average: WeightAverage) -> dict[str, torch.Tensor]:
    """Return all that is saved, gathered by functions of DeepSpeed where it partitions anything."""
    state = {}
    optimizer = model.engine.optimizer
    if hasattr(optimizer, "_lazy_init_hp_params_optimizer_state"):
        optimizer._hp_optimizer_states_linked = False  # DeepSpeed links them before torch's optimiser has made them
        optimizer._lazy_init_hp_params_optimizer_state()
    for name, parameter in model.module.named_parameters():
        if not parameter.requires_grad:
            continue
        if model.ds.zero_stage is None or is_plain(model.ds):
            owner = optimizer.masters[parameter] if model.ds.zero_stage is None else parameter
            moments = base_state(optimizer)[owner]
            state[name] = owner.detach().clone()
            state |= {f"{name} {key}": moments[key].clone() for key in ("exp_avg", "exp_avg_sq")}
        else:
            state[name] = safe_get_full_fp32_param(parameter)
            state |= {f"{name} {k}": safe_get_full_optimizer_state(parameter, k) for k in ("exp_avg", "exp_avg_sq")}
    state["updates"] = torch.tensor(float(next(iter(base_state(optimizer).values()))["step"]))
    state |= {f"{name} in the model": weight for name, weight in weights_on_cpu(model.module, model.gather).items()}
    with average.in_place():
        averages = weights_on_cpu(model.module, model.gather)
    state |= {f"{name} averaged": value.clone() for name, value in averages.items()}
    return state


def save_and_go_on(world: World, folder: Path, setup: Setup, batches: Sequence[Experience], checkpoint: Path) -> Whole:
    """Train, save, and train on without a stop."""
    torch.manual_seed(world.rank)
    model, run = build(world, folder, setup), Whole()
    average = WeightAverage(model, BETA)
    for step in range(BEFORE):
        one_step(model, batches[step], step, setup)
        average.update()
    if world.is_main:
        checkpoint.mkdir(parents=True)
    world.barrier()
    model.save_state(checkpoint)
    average.save_state(checkpoint)
    world.barrier()
    run.state = whole_state(model, average)
    return go_on(model, batches, setup, run)


def load_and_go_on(
    world: World, folder: Path, setup: Setup, batches: Sequence[Experience], checkpoints: Sequence[Path]
) -> list[Whole]:
    """Load each checkpoint into a model of this shape, and train on."""
    model, runs = build(world, folder, setup), []
    for checkpoint in checkpoints:
        run, average = Whole(), WeightAverage(model, BETA)
        model.load_state(checkpoint)
        average.load_state(checkpoint)
        run.state = whole_state(model, average)
        runs.append(go_on(model, batches, setup, run))
        world.barrier()
    return runs


def go_on(model: TrainedModel, batches: Sequence[Experience], setup: Setup, run: Whole) -> Whole:
    for step in range(BEFORE, BEFORE + AFTER):
        run.metrics.append(one_step(model, batches[step], step, setup))
    run.weights = weights_on_cpu(model.module, model.gather)
    return run


def distance(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> float:
    """Return the largest difference of a weight; 0 only if both are equal bit for bit."""
    assert one.keys() == other.keys()
    return max(float((one[name].double() - other[name].double()).abs().max()) for name in one)
