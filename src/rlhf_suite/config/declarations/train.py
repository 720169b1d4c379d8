"""`train`: batch arithmetic, epochs, seed, placement."""

from __future__ import annotations

from dataclasses import dataclass

from rlhf_suite import registry
from rlhf_suite.config.declarations.agent import FILES
from rlhf_suite.config.declarations.conditions import (
    Need,
    algorithm_needs,
    is_false,
    is_not,
    is_null,
    is_one_of,
    is_set,
    is_true,
)
from rlhf_suite.config.declarations.eval import EVALUATED
from rlhf_suite.config.declarations.flags import FIXED, SHAPE, flag
from rlhf_suite.config.declarations.sections import Section
from rlhf_suite.config.declarations.task_groups import RL, TRAINED

BUDGETED = is_null(".micro_batch_size") | is_true(".dynamic_batch_enable")


@dataclass
class TrainConfig(Section):
    """The optimiser step, in task=ppo the RL loop too"""

    batch_size: int = flag(128, "Sequences (or pairs) per optimiser step, over all ranks", ge=1)
    micro_batch_size: int | None = flag(None, ge=1, resume=SHAPE)
    """Sequences (or pairs) per rank and forward pass; null: as many as train.max_tokens_per_gpu has space for"""
    dynamic_batch_enable: bool | None = flag(
        None,
        resume=SHAPE,
        needs=tuple(
            Need(is_set(f"{section}.micro_batch_size", "<number>"), "there is no token budget", at=is_one_of("", False))
            for section in ("train", "rollout")
        ),
    )
    """Form balanced micro-batches by a token budget; null: where no number of sequences is written; true: also where
    one is; false: never"""
    max_tokens_per_gpu: int | None = flag(None, ge=1, resume=SHAPE, when=BUDGETED)
    """Token budget of a micro-batch, for each rank that holds a part of its tokens. Padding counts; a longer
    row raises the budget of its step to its own length. null: 4096; on GPUs the plan may decide for up to 16384"""
    max_epochs: int = flag(2, ge=1, defaults=dict.fromkeys(("rm", "dpo", "kto", "prm", "distill", *RL), 1))
    """Passes over the data, in task=ppo over each rollout batch"""
    max_steps: int | None = flag(None, "Stop after this many optimiser steps (RL: rollout steps)", ge=1)
    early_stopping_patience: int | None = flag(
        None,
        ge=1,
        needs=(
            Need(EVALUATED, "it stops by an evaluation"),
            Need(is_not("ckpt.best_metric_key", "none", "null"), "there is no metric to stop by"),
        ),
        tasks=TRAINED,
    )
    """Stop after so many evaluations in a row in which the metric of ckpt.best_metric_key (null: the task's first) did
    not improve; null: never"""
    callbacks: list[str] = flag([], algorithms=registry.callback)
    """Classes, and functions (step, metrics, samples), of your own that are called after each step and elsewhere, and
    may stop the run, save or evaluate (docs/callbacks.md)"""
    seed: int = flag(42, "Seed of data order, initialisation and sampling", ge=0)
    full_determinism_enable: bool = flag(False, "Use deterministic kernels everywhere, at some cost in speed")
    on_nonfinite: str = flag("stop", choices=("stop", "skip"), defaults={"serve_train": "skip"})
    """What happens at a loss or gradient that is not finite: the run ends, or the step is skipped"""
    num_episodes: int = flag(1, "Passes over the prompts", ge=1, tasks=RL)
    agent_func_path: str | None = flag(None, when=algorithm_needs("agent.kind", registry.agent, *FILES), tasks=RL)
    """Your .py file with the environment or the tools of agents (docs/agents.md)"""
    enable_ema: bool = flag(
        False,
        resume=FIXED,
        needs=Need(is_one_of("ds.zpg", 1), "a second partition of the weights would be gathered in their place"),
        tasks=RL,
    )
    """Keep a moving average of the policy's weights, exported beside the policy as *_ema"""
    ema_beta: float = flag(0.992, ge=0, lt=1, when=is_true(".enable_ema"), tasks=RL)
    """Share of itself that the average keeps at each optimiser step"""
    async_enable: bool = flag(
        False,
        "Make the rollouts of later steps while the policy trains",
        resume=FIXED,
        needs=Need(
            is_false(".colocate_all"),
            "engines that share their devices with the models cannot generate while the policy trains",
            fix="write train.colocate_all=false; or train.async_enable=false: with train.partial_rollout_enable=true "
            "the engines stop for each update, and continue",
        ),
        tasks=RL,
    )
    async_queue_size: int = flag(
        1, ge=0, resume=FIXED, when=is_true(".async_enable") | is_true(".partial_rollout_enable"), tasks=RL
    )
    """By how many steps the weights that write a rollout are older than the policy (with train.partial_rollout_enable:
    at most); 0: as without train.async_enable"""
    partial_rollout_enable: bool = flag(
        False, resume=FIXED, when=is_true(".async_enable") | is_true(".colocate_all"), tasks=RL
    )
    """Sync weights while responses are unfinished, and train on groups as they end, so that no step waits for long
    responses; not the same numbers each time. With train.colocate_all the engines stop while the models train, and
    continue the responses afterwards"""
    async_run_ahead: int = flag(1, ge=1, when=is_true(".partial_rollout_enable"), tasks=RL)
    """Batches of groups that are under way beside the one that is trained; at most train.async_queue_size"""
    colocate_all: bool | None = flag(None, resume=SHAPE, tasks=RL)
    """All models and engines share the same devices; null: where one machine has too few GPUs for all roles"""
    colocate_actor_ref: bool = flag(False, "Actor and reference share devices", resume=SHAPE, tasks=RL)
    colocate_critic_reward: bool = flag(False, "Critic and reward model share devices", resume=SHAPE, tasks=RL)
