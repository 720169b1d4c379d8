"""How many tokens a micro-batch has on a GPU, where a run leaves that to the plan.

The host needs some milliseconds per layer to launch the kernels of a micro-batch, whatever it computes. A small model
on few tokens is done before that, so the GPU waits: the step of an H200 on 0.5 billion parameters took 0.15 s for each
micro-batch of 4,096 tokens, of which it computed 0.03 s (docs/performance_gpu.md). So the budget is doubled while a
micro-batch computes for less than the host needs, and fits with the models' activations kept.
"""

from __future__ import annotations

from collections.abc import Callable

from rlhf_suite.config.declarations.runs import Run
from rlhf_suite.config.plan.micro_batches import LEAST_TOKENS, trained_micro_batches
from rlhf_suite.planner.checkpointing import FREE
from rlhf_suite.planner.needs import Target
from rlhf_suite.planner.remedies import with_values

BUDGET = "train.max_tokens_per_gpu"
MOST_TOKENS = 16_384
HOST_S = 0.15  # that a host needs for a micro-batch


def decide_budget(run: Run, target: Target, seconds: Callable[[Run], float], peak: Callable[[Run], int]) -> int | None:
    """Return the token budget of a micro-batch; None where a run does not leave it open, or the GPU is not known.

    `seconds` returns how long the longest micro-batch of a run computes, and `peak` the bytes of the fullest GPU.
    """
    is_open = run.train.max_tokens_per_gpu is None and trained_micro_batches(run.train).tokens is not None
    if target.device is None or target.flops is None or not is_open:
        return None
    budget, room = LEAST_TOKENS, target.memory * (1 - FREE)
    while budget < MOST_TOKENS and seconds(with_budget(run, budget)) < HOST_S:
        if peak(with_budget(run, 2 * budget)) > room:
            break
        budget *= 2
    return budget


def with_budget(run: Run, budget: int | None) -> Run:
    """Return the run with a token budget that was decided; as it is with None."""
    return run if budget is None else with_values(run, {BUDGET: budget})
