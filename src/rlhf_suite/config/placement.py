"""The rules about the ranks of models, what they share, and which of them work at the same time."""

from __future__ import annotations

from collections.abc import Iterator

from rlhf_suite.config.plan import model_sections, num_ranks
from rlhf_suite.config.problems import Problem, rule
from rlhf_suite.config.runs import PPORun


def ranks(run: PPORun) -> dict[str, int]:
    """Return the number of ranks of each model that this run has."""
    return {name: num_ranks(section) for name, section in model_sections(run).items()}


@rule
def rollouts_divide(run: PPORun) -> Iterator[Problem]:
    """Check that a step has a whole number of optimiser steps, and that the ranks of each model get equal shares."""
    samples = run.rollout.batch_size * run.rollout.n_samples_per_prompt
    said = f"{run.rollout.batch_size} prompts x {run.rollout.n_samples_per_prompt} samples = {samples}"
    if samples % run.train.batch_size:
        fix = "make rollout.batch_size x rollout.n_samples_per_prompt a multiple of train.batch_size"
        yield Problem(
            "rollout.batch_size", f"{said} are not a multiple of train.batch_size={run.train.batch_size}", fix
        )
    for name, count in ranks(run).items():
        if samples % count:
            fix = f"change rollout.batch_size, or {name}.num_nodes x {name}.num_gpus_per_node"
            yield Problem(f"{name}.num_gpus_per_node", f"{said} cannot be shared evenly by {count} ranks", fix)


@rule
def critic_batches_divide(run: PPORun) -> Iterator[Problem]:
    """Check a critic with another number of ranks than the actor; `batches_divide` checks the actor's."""
    count = ranks(run).get("critic")
    if count in (None, ranks(run)["actor"]):
        return
    share = count if run.train.dynamic_batch_enable else count * run.train.micro_batch_size
    if run.train.batch_size % share:
        what = (
            f"train.batch_size={run.train.batch_size} is not a multiple of the critic's ranks x micro-batch = {share}"
        )
        yield Problem("critic.num_gpus_per_node", what, "give the critic as many ranks as the actor")


@rule
def shared_devices_match(run: PPORun) -> Iterator[Problem]:
    sizes = ranks(run)
    engines = run.vllm.num_engines * run.vllm.tensor_parallel_size
    groups = (
        ("colocate_all", run.train.colocate_all, sizes | {"vllm": engines}),
        ("colocate_actor_ref", run.train.colocate_actor_ref, subset(sizes, "actor", "ref")),
        ("colocate_critic_reward", run.train.colocate_critic_reward, subset(sizes, "critic", "reward")),
    )
    for name, is_on, members in groups:
        if is_on and len(set(members.values())) > 1:
            said = ", ".join(f"{member} {count}" for member, count in members.items())
            fix = "make num_nodes x num_gpus_per_node (vllm: num_engines x tensor_parallel_size) equal"
            yield Problem(f"train.{name}", f"shared devices need equal numbers: {said}", fix)
    if run.train.colocate_all and run.vllm.tensor_parallel_size > 1:
        what = f"an engine on {run.vllm.tensor_parallel_size} devices cannot share each with one actor rank"
        fix = "write vllm.tensor_parallel_size=1 and as many vllm.num_engines as the actor has ranks"
        yield Problem("vllm.tensor_parallel_size", f"{what} (train.colocate_all=true)", fix)


def subset(sizes: dict[str, int], *names: str) -> dict[str, int]:
    return {name: sizes[name] for name in names if name in sizes}


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
