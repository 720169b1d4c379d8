"""Whether a run can use the nodes that it is given: only what runs on Ray spans several."""

from __future__ import annotations

from rlhf_suite.config.problems import Problem
from rlhf_suite.config.reward import reward_model
from rlhf_suite.config.runs import LoopRun, Run, SamplingRun, ScoreRun, SupervisedRun


def node_problem(run: Run, key: str, num_nodes: int, fix: str) -> Problem | None:
    """What is wrong with `num_nodes` nodes for `run`; `key` gave them, `fix` takes one instead."""
    if num_nodes == 1 or is_on_ray(run):
        return None
    if isinstance(run, LoopRun):
        what = f"{num_nodes} nodes, but each stage of task={run.task} is a process of its own on the first one"
        fix = f"{fix}; or run the stages one by one, each a job that may have several nodes (docs/sampling.md)"
        return Problem(key, what, fix)
    return Problem(key, f"{num_nodes} nodes, but this run is one process, and would leave the others idle", fix)


def is_on_ray(run: Run) -> bool:
    """Whether its workers are spread over a Ray cluster, which may have several nodes."""
    return isinstance(run, SamplingRun) or num_ranks(run) > 1


def num_ranks(run: Run) -> int:
    """Ranks of the one model that a run without engines trains or asks."""
    if isinstance(run, SupervisedRun):
        return run.actor.num_nodes * run.actor.num_gpus_per_node
    if isinstance(run, ScoreRun) and run.reward.process.enable:
        return run.reward.process.num_nodes * run.reward.process.num_gpus_per_node
    if isinstance(run, ScoreRun) and reward_model(run.reward) is not None:
        return run.reward.num_nodes * run.reward.num_gpus_per_node
    return 1
