"""Learning-rate schedules. The rate is a pure function of the step: a resumed run needs no state of a scheduler.

A schedule gives the rate over its peak from the end of the warm-up on. The warm-up itself is the same for all of them.
Those of transformers are its own functions, asked for one step; their warm-up is not used.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import SupportsFloat

from rlhf_suite.config.declarations.models import TrainedModelConfig
from rlhf_suite.registry import schedule

ROUNDING = 1e-9  # 0.07 * 100 steps is 7.000000000000001
WARMUP = "lr_warmup_ratio"


@dataclass(frozen=True)
class Moment:
    """Where in its schedule a run is. The first optimiser step is 0."""

    step: int
    warmup_steps: int
    total_steps: int

    @property
    def progress(self) -> float:
        """The share of the steps after the warm-up that are done, 0 to 1."""
        return (self.step - self.warmup_steps) / max(1, self.total_steps - self.warmup_steps)

    @property
    def cosine(self) -> float:
        """Half a cosine wave, from 1 to 0."""
        return 0.5 * (1 + math.cos(math.pi * self.progress))


def learning_rate_factor(step: int, total_steps: int, config: TrainedModelConfig) -> float:
    """Return the learning rate of optimiser step `step` (0-based) over its peak.

    Warm-up is linear over ceil(lr_warmup_ratio * total_steps) steps and reaches the peak at its last step; the first
    step already trains.
    """
    warmup = math.ceil(config.lr_warmup_ratio * total_steps - ROUNDING)
    if step < warmup and schedule.reads(config.lr_scheduler, WARMUP):
        return (step + 1) / warmup
    factor = schedule.load(config.lr_scheduler)(Moment(step, warmup, total_steps), config)
    if not isinstance(factor, SupportsFloat):
        raise schedule.wrong_result(config.lr_scheduler, factor, "a number")
    return float(factor)


@schedule()
def constant(moment: Moment, config: TrainedModelConfig) -> float:
    """The peak rate at every step, without a warm-up."""
    return 1.0


@schedule(reads=("lr_warmup_ratio",))
def constant_with_warmup(moment: Moment, config: TrainedModelConfig) -> float:
    """The peak rate after the warm-up."""
    return 1.0


@schedule(reads=("lr_warmup_ratio",))
def linear(moment: Moment, config: TrainedModelConfig) -> float:
    """A straight line from the peak to 0."""
    return 1 - moment.progress


@schedule(reads=("lr_warmup_ratio",))
def cosine(moment: Moment, config: TrainedModelConfig) -> float:
    """Half a cosine wave from the peak to 0: (1 + cos(pi p)) / 2, with p the share of the steps after the warm-up."""
    return moment.cosine


@schedule(reads=("lr_warmup_ratio", "min_lr_ratio"))
def cosine_with_min_lr(moment: Moment, config: TrainedModelConfig) -> float:
    """Half a cosine wave from the peak to min_lr_ratio of it."""
    return config.min_lr_ratio + (1 - config.min_lr_ratio) * moment.cosine


@schedule(reads=("lr_warmup_ratio", "lr_cycles"))
def cosine_with_restarts(moment: Moment, config: TrainedModelConfig) -> float:
    """lr_cycles half cosine waves, each from the peak to 0 (transformers; SGDR, arXiv:1608.03983)."""
    after = moment.step - moment.warmup_steps
    return of_transformers(
        "cosine_with_restarts", 0, moment.total_steps - moment.warmup_steps, ("num_cycles", config.lr_cycles)
    )(after)


@schedule(reads=("lr_warmup_ratio", "min_lr_ratio"))
def polynomial(moment: Moment, config: TrainedModelConfig) -> float:
    """A straight line from the peak to min_lr_ratio of it (transformers, power 1)."""
    after, steps = moment.step - moment.warmup_steps, moment.total_steps - moment.warmup_steps
    lowest = min(config.min_lr_ratio, 1 - ROUNDING)  # transformers wants it below the peak
    return of_transformers("polynomial", 0, steps, ("lr_end", lowest))(after)


@schedule(reads=("lr_warmup_ratio",))
def inverse_sqrt(moment: Moment, config: TrainedModelConfig) -> float:
    """The peak over the square root of step / warm-up steps, or of step / 10000 without a warm-up (transformers)."""
    return of_transformers("inverse_sqrt", moment.warmup_steps, moment.total_steps)(moment.step + 1)


@schedule(reads=("lr_warmup_ratio", "min_lr_ratio", "lr_decay_ratio"))
def warmup_stable_decay(moment: Moment, config: TrainedModelConfig) -> float:
    """The peak rate, and over the last lr_decay_ratio of all steps a cosine to min_lr_ratio of it (transformers)."""
    steps = moment.total_steps - moment.warmup_steps
    decay = min(steps, math.ceil(config.lr_decay_ratio * moment.total_steps - ROUNDING))
    settings = (("num_decay_steps", decay), ("min_lr_ratio", config.min_lr_ratio))
    return of_transformers("warmup_stable_decay", 0, steps, *settings)(moment.step - moment.warmup_steps)


@cache
def of_transformers(name: str, warmup: int, total: int, *settings: tuple[str, float]) -> Callable[[int], float]:
    """Return the function from a step to the factor that transformers' scheduler `name` has; its peak rate is 1."""
    import torch
    from transformers import get_scheduler

    optimizer = torch.optim.SGD([torch.zeros(1)], lr=1.0)
    made = get_scheduler(name, optimizer, warmup, total, scheduler_specific_kwargs=dict(settings))
    factor: Callable[[int], float] = made.lr_lambdas[0]
    return factor
