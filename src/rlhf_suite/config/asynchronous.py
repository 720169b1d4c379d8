"""The rules of asynchronous training: rollouts are made by older weights while the policy trains."""

from __future__ import annotations

from collections.abc import Iterator

from rlhf_suite.config.problems import Problem, rule
from rlhf_suite.config.runs import PPORun


@rule
def older_rollouts_are_corrected(run: PPORun) -> Iterator[Problem]:
    """Old rollouts come from another policy than the one that the loss compares with."""
    stale = run.train.async_enable and run.train.async_queue_size > 0
    if stale and run.algo.advantage.is_correction_level == "off":
        what = (
            f"rollouts by weights that are {run.train.async_queue_size} steps old are trained on as if the policy had "
            "written them, which makes training collapse"
        )
        yield Problem("train.async_enable", what, "add correction=tis (or icepop), or write train.async_queue_size=0")


@rule
def engines_have_their_own_devices(run: PPORun) -> Iterator[Problem]:
    if not run.train.async_enable:
        return
    for flag in ("train.colocate_all", "vllm.enable_sleep"):
        if run.train.colocate_all if flag == "train.colocate_all" else run.vllm.enable_sleep:
            what = "engines that share their devices with the models cannot generate while the policy trains"
            yield Problem(flag, what, f"write {flag}=false, or train.async_enable=false")
