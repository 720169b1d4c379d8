"""`train`: batch arithmetic, epochs, seed, placement."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rlhf_suite.config.flags import FIXED, flag, is_true
from rlhf_suite.config.problems import Problem, rule

if TYPE_CHECKING:
    from rlhf_suite.config.runs import AnyTrainedRun, PPORun


@dataclass
class TrainConfig:
    """The optimiser step"""

    batch_size: int = flag(128, "Sequences (or pairs) per optimiser step, over all ranks", ge=1)
    micro_batch_size: int = flag(8, "Sequences (or pairs) per rank and forward pass", ge=1)
    dynamic_batch_enable: bool = flag(False, "Form balanced micro-batches by a token budget; needs ds.packing_samples")
    max_tokens_per_gpu: int = flag(16192, "Token budget of a micro-batch", ge=1, when=is_true(".dynamic_batch_enable"))
    max_epochs: int = flag(2, "Passes over the data", ge=1)
    max_steps: int | None = flag(None, "Stop after this many optimiser steps (RL: rollout steps)", ge=1)
    early_stopping_patience: int | None = flag(
        None,
        "Stop after so many evaluations in a row in which the metric of ckpt.best_metric_key (null: the task's first) "
        "did not improve; null: never",
        ge=1,
    )
    seed: int = flag(42, "Seed of data order, initialisation and sampling", ge=0)
    full_determinism_enable: bool = flag(False, "Use deterministic kernels everywhere, at some cost in speed")
    on_nonfinite: str = flag(
        "stop",
        "What happens at a loss or gradient that is not finite: the run ends, or the step is skipped",
        choices=("stop", "skip"),
    )


@dataclass
class RLTrainConfig(TrainConfig):
    """The optimiser step and the RL loop"""

    micro_batch_size: int = flag(1, "Sequences per rank and forward pass", ge=1)
    max_epochs: int = flag(1, "Passes over each rollout batch", ge=1)
    num_episodes: int = flag(1, "Passes over the prompts", ge=1)
    enable_ema: bool = flag(
        False, "Keep a moving average of the policy's weights, exported beside the policy as *_ema", resume=FIXED
    )
    ema_beta: float = flag(
        0.992, "Share of itself that the average keeps at each optimiser step", ge=0, lt=1, when=is_true(".enable_ema")
    )
    async_enable: bool = flag(False, "Make the rollouts of later steps while the policy trains", resume=FIXED)
    async_queue_size: int = flag(
        1,
        "How many steps older than the policy the weights are that write a rollout; 0: as without train.async_enable",
        ge=0,
        resume=FIXED,
        when=is_true(".async_enable"),
    )
    colocate_all: bool | None = flag(
        None, "All models and engines share the same devices; null: where one machine has too few GPUs for all roles"
    )
    colocate_actor_ref: bool = flag(False, "Actor and reference share devices")
    colocate_critic_reward: bool = flag(False, "Critic and reward model share devices")


SEQUENCES_PER_ROW = {"rm": 2, "dpo": 2, "kto": 2}


@rule
def batches_divide(run: AnyTrainedRun) -> Iterator[Problem]:
    """train.batch_size = ranks x micro_batch_size x a whole number of micro-batches."""
    ranks = run.actor.num_nodes * run.actor.num_gpus_per_node
    size, micro = run.train.batch_size, run.train.micro_batch_size
    if run.train.dynamic_batch_enable:
        if size % ranks:
            fix = f"write train.batch_size={next_multiple(size, ranks)}"
            yield Problem("train.batch_size", f"{size} is not a multiple of the actor's {ranks} ranks", fix)
    elif size % (ranks * micro):
        what = f"{size} is not a multiple of train.micro_batch_size x ranks = {micro} x {ranks}"
        yield Problem("train.batch_size", what, f"write train.batch_size={next_multiple(size, ranks * micro)}")


def next_multiple(number: int, factor: int) -> int:
    return -(-number // factor) * factor


@rule
def token_budget_holds_a_sequence(run: AnyTrainedRun) -> Iterator[Problem]:
    if run.train.dynamic_batch_enable and not run.ds.packing_samples:
        what = "a token budget does not count padding, so it needs packed sequences"
        yield Problem("train.dynamic_batch_enable", what, "add ds.packing_samples=true")
    count = SEQUENCES_PER_ROW.get(run.task, 1)
    least = count * run.data.max_len
    if run.train.dynamic_batch_enable and run.train.max_tokens_per_gpu < least:
        row = "one sequence" if count == 1 else f"the {count} sequences of a row, each"
        what = f"{run.train.max_tokens_per_gpu} tokens are too few for {row} of data.max_len={run.data.max_len}"
        yield Problem("train.max_tokens_per_gpu", what, f"write train.max_tokens_per_gpu={least} or more")


@rule
def average_is_whole(run: PPORun) -> Iterator[Problem]:
    if run.train.enable_ema and run.ds.zpg > 1:
        what = "a second partition of the weights (ds.zpg) would be gathered in place of their average"
        yield Problem("train.enable_ema", what, "write ds.zpg=1, or remove train.enable_ema")
