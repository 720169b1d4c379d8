"""Rules between the flags of the RL task: batches, estimators, reward, placement, engines, KL."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from rlhf_suite import registry
from rlhf_suite.config.checks.algo import RULES as ALGO_RULES
from rlhf_suite.config.checks.optim import experts_keep_their_gradient, frozen_names_fit, muon_fits
from rlhf_suite.config.data import PromptTextConfig
from rlhf_suite.config.optim import TrainedModelConfig
from rlhf_suite.config.problems import Problem
from rlhf_suite.config.ref import ReferenceConfig
from rlhf_suite.config.reward import ProcessRewardConfig, RewardConfig, reward_model
from rlhf_suite.config.runs import PPORun, SamplingRun
from rlhf_suite.config.sources import evaluation_problems, source_problems
from rlhf_suite.config.teacher import RLTeacherConfig

RankedConfig = TrainedModelConfig | ReferenceConfig | RLTeacherConfig | RewardConfig | ProcessRewardConfig


def ranks(run: PPORun) -> dict[str, int]:
    """Ranks of each model that this run has."""
    sections: dict[str, RankedConfig] = {"actor": run.actor}
    if run.algo.advantage.needs("values"):
        sections["critic"] = run.critic
    if run.algo.kl.init_coef > 0:
        sections["ref"] = run.ref
    if run.algo.distill.coef > 0:
        sections["teacher"] = run.teacher
    if reward_model(run.reward) is not None:
        sections["reward"] = run.reward
    if run.reward.process.enable:
        sections["reward.process"] = run.reward.process
    return {name: section.num_nodes * section.num_gpus_per_node for name, section in sections.items()}


def rollouts_divide(run: PPORun) -> Iterator[Problem]:
    """A step's samples are a whole number of optimiser steps, and every model's ranks get the same share."""
    samples = run.rollout.batch_size * run.rollout.n_samples_per_prompt
    said = f"{run.rollout.batch_size} prompts x {run.rollout.n_samples_per_prompt} samples = {samples}"
    if samples % run.train.batch_size:
        fix = "make rollout.batch_size x rollout.n_samples_per_prompt a multiple of train.batch_size"
        yield Problem("rollout.batch_size", f"{said} are no multiple of train.batch_size={run.train.batch_size}", fix)
    for name, count in ranks(run).items():
        if samples % count:
            fix = f"change rollout.batch_size, or {name}.num_nodes x {name}.num_gpus_per_node"
            yield Problem(f"{name}.num_gpus_per_node", f"{said} cannot be shared evenly by {count} ranks", fix)


def critic_batches_divide(run: PPORun) -> Iterator[Problem]:
    """A critic with as many ranks as the actor divides the batch as the actor does: `batches_divide` reports that."""
    count = ranks(run).get("critic")
    if count in (None, ranks(run)["actor"]):
        return
    share = count if run.train.dynamic_batch_enable else count * run.train.micro_batch_size
    if run.train.batch_size % share:
        what = f"train.batch_size={run.train.batch_size} is no multiple of the critic's ranks x micro-batch = {share}"
        yield Problem("critic.num_gpus_per_node", what, "give the critic as many ranks as the actor")


def critic_betas_are_two(run: PPORun) -> Iterator[Problem]:
    if len(run.critic.adam.betas) != 2:
        what = f"{len(run.critic.adam.betas)} values, not 2"
        yield Problem("critic.adam.betas", what, "write 'critic.adam.betas=[0.9,0.95]'")


def critic_optimiser_fits(run: PPORun) -> Iterator[Problem]:
    yield from muon_fits("critic", run.critic, run.ds)
    yield from experts_keep_their_gradient("critic", run.critic)
    yield from frozen_names_fit("critic", run.critic, run.ds)


def group_is_large_enough(run: PPORun) -> Iterator[Problem]:
    estimator = run.algo.advantage.estimator
    if run.algo.advantage.needs("groups") and run.rollout.n_samples_per_prompt < 2:
        what = f"algo.advantage.estimator={estimator} compares the samples of a prompt with each other, there is 1"
        yield Problem("rollout.n_samples_per_prompt", what, "write rollout.n_samples_per_prompt=8")


def ranges_are_ordered(run: PPORun) -> Iterator[Problem]:
    clip = run.reward.clip_range
    if len(clip) != 2 or clip[0] >= clip[1]:
        fix = "write 'reward.clip_range=[-10,10]'"
        yield Problem("reward.clip_range", f"{clip} is not [low, high] with low < high", fix)
    low_high = run.actor.eps_clip_low_high
    if low_high is not None and len(low_high) != 2:
        key = "actor.eps_clip_low_high"
        yield Problem(key, f"{len(low_high)} values, not [low, high]", f"write '{key}=[0.2,0.28]'")


def has_prompts(run: PPORun) -> Iterator[Problem]:
    data = run.data
    columns = prompt_columns(data) if data.row_format is None else {}
    yield from source_problems(
        "data.prompt_dataset", data.prompt_dataset, columns, "data.prompt_probs", data.prompt_probs
    )
    yield from evaluation_problems(run.eval, columns)
    if run.eval.dataset is not None and run.eval.steps == -1:
        yield Problem("eval.steps", "eval.dataset is set, but never used", "add eval.steps=<every so many steps>")


def prompt_columns(data: PromptTextConfig) -> dict[str, str]:
    """Return the flags that name columns of prompts, and the columns."""
    named = {"data.input_key": data.input_key, "data.label_key": data.label_key, "data.tools_key": data.tools_key}
    named["data.reward_columns"] = ",".join(data.reward_columns) or None
    return {flag: column for flag, column in named.items() if column is not None}


def room_for_a_prompt(run: SamplingRun) -> Iterator[Problem]:
    new = run.rollout.max_new_tokens
    if new is not None and new >= run.data.max_len:
        what = f"{new} leaves no room for a prompt in data.max_len={run.data.max_len}"
        yield Problem("rollout.max_new_tokens", what, f"write less than {run.data.max_len}, or raise data.max_len")


def sampling_is_unchanged(run: PPORun) -> Iterator[Problem]:
    """Truncated sampling draws from another distribution than the one whose log-probs are trained."""
    rollout = run.rollout
    for name, value, neutral in (
        ("top_p", rollout.top_p, 1.0),
        ("top_k", rollout.top_k, -1),
        ("min_p", rollout.min_p, 0.0),
    ):
        corrected = run.algo.advantage.is_correction_level != "off"
        if value != neutral and not (corrected and run.algo.mismatch_max is not None):
            key = f"rollout.{name}"
            what = f"{value} cuts tokens off, and the trainer's log-probs would not be those of the samples"
            fix = (
                f"write {key}={neutral}, or correct for it (correction=tis) and say with algo.mismatch_max=<nats> how "
                "far they may differ"
            )
            yield Problem(key, what, fix)


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


def engines_fit(run: PPORun) -> Iterator[Problem]:
    vllm = run.vllm
    if vllm.enable_sleep and not run.train.colocate_all:
        fix = "leave it away, or add train.colocate_all=true"
        yield Problem("vllm.enable_sleep", "an engine that shares no device has no reason to sleep", fix)
    if vllm.sync_backend == "ipc" and not run.train.colocate_all:
        what = "ipc needs trainer and engine on the same GPU"
        yield Problem("vllm.sync_backend", what, "write vllm.sync_backend=auto, or add train.colocate_all=true")
    if run.launch.device == "cpu" and vllm.sync_backend in ("nccl", "ipc"):
        what = f"{vllm.sync_backend} needs GPUs (launch.device=cpu)"
        yield Problem("vllm.sync_backend", what, "write vllm.sync_backend=auto")


def engines_are_whole(run: SamplingRun) -> Iterator[Problem]:
    if run.launch.device == "cpu" and run.vllm.tensor_parallel_size > 1:
        what = "engines on a CPU are not split (launch.device=cpu)"
        yield Problem("vllm.tensor_parallel_size", what, "write vllm.tensor_parallel_size=1, raise vllm.num_engines")


def kl_has_a_coefficient(run: PPORun) -> Iterator[Problem]:
    kl = run.algo.kl
    if kl.init_coef == 0:
        for name, is_on, off in (("target", kl.target is not None, "null"), ("use_loss", kl.use_loss, "false")):
            if is_on:
                key = f"algo.kl.{name}"
                fix = f"write {key}={off}, or algo.kl.init_coef=0.01"
                yield Problem(key, "has no effect with algo.kl.init_coef=0, which means no reference", fix)


def kl_pulls(run: PPORun) -> Iterator[Problem]:
    kl, samples = run.algo.kl, run.rollout.batch_size * run.rollout.n_samples_per_prompt
    if (
        kl.use_loss
        and registry.kl_estimator.needs(kl.estimator, "reward")
        and kl.init_coef > 0
        and not kl.unbiased_gradient
    ):
        what = f"{kl.estimator} as a loss has a gradient of mean zero, so it pulls nowhere"
        fix = "write algo.kl.estimator=k3, algo.kl.unbiased_gradient=true or algo.kl.use_loss=false"
        yield Problem("algo.kl.estimator", what, fix)
    if kl.target is not None and kl.horizon <= 0.2 * samples:
        what = f"{kl.horizon} is so short for {samples} samples a step that the coefficient could fall to 0"
        yield Problem("algo.kl.horizon", what, f"write algo.kl.horizon={10 * samples}")


def teacher_is_there(run: PPORun) -> Iterator[Problem]:
    if run.algo.distill.coef > 0 and run.teacher.model_name_or_path is None:
        key = "teacher.model_name_or_path"
        yield Problem(key, "algo.distill needs a teacher, and none is named", f"add {key}=<HF folder or hub name>")
    if run.algo.distill.coef == 0 and run.algo.advantage.needs("teacher"):
        what = f"0 means no teacher, and estimator={run.algo.advantage.estimator} learns from one"
        yield Problem("algo.distill.coef", what, "write algo.distill.coef=1, or another estimator")
    if run.algo.dynamic_filtering_enable and not run.algo.advantage.needs("rewards"):
        key = "algo.dynamic_filtering_enable"
        what = f"drops groups by their scores, and estimator={run.algo.advantage.estimator} learns nothing from scores"
        yield Problem(key, what, f"write {key}=false")


def policy_is_not_drawn(run: PPORun) -> Iterator[Problem]:
    if run.ds.lora.rank > 0 and run.ds.lora.dropout > 0:
        what = f"{run.ds.lora.dropout} would train another policy in every forward than the one that sampled"
        yield Problem("ds.lora.dropout", what, "write ds.lora.dropout=0.0")


RULES: tuple[Callable[[PPORun], Iterable[Problem]], ...] = (
    rollouts_divide,
    critic_batches_divide,
    critic_betas_are_two,
    critic_optimiser_fits,
    group_is_large_enough,
    ranges_are_ordered,
    has_prompts,
    room_for_a_prompt,
    sampling_is_unchanged,
    shared_devices_match,
    engines_fit,
    engines_are_whole,
    kl_has_a_coefficient,
    kl_pulls,
    teacher_is_there,
    policy_is_not_drawn,
    *ALGO_RULES,
)
