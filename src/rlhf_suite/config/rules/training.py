"""Rules about batches, ranks of models and what they share, ZeRO stages, rollouts ahead, evaluation, continued runs."""

from __future__ import annotations

from collections.abc import Iterator

from rlhf_suite.config.check.formatting import did_you_mean, next_multiple, number_of
from rlhf_suite.config.check.names import unknown_flag
from rlhf_suite.config.check.problems import Problem, rule
from rlhf_suite.config.check.sources import metric_names, names_in
from rlhf_suite.config.declarations.ckpt import NO_METRIC
from rlhf_suite.config.declarations.ds import DeepSpeedConfig
from rlhf_suite.config.declarations.flags import FIXED, all_values
from rlhf_suite.config.declarations.metrics import direction_of
from rlhf_suite.config.declarations.runs import TASKS, Run, flags_of, resume_of
from rlhf_suite.config.declarations.task_groups import RESUMABLE, RL, TRAINED, TRAINING
from rlhf_suite.config.plan.micro_batches import trained_micro_batches
from rlhf_suite.config.plan.run_plan import data_ranks, makes_rollouts_ahead, num_ranks, ranked_sections


@rule(tasks=TRAINED)
def ranks_form_groups(run: Run) -> Iterator[Problem]:
    sizes = {"ds.ring_attn_size": run.ds.ring_attn_size, "ds.tensor_parallel_size": run.ds.tensor_parallel_size}
    size = run.ds.ring_attn_size * run.ds.tensor_parallel_size
    named = " x ".join(f"{key}={value}" for key, value in sizes.items() if value > 1)
    for name, section in ranked_sections(run).items():
        if num_ranks(section) % size:
            problem = f"{number_of(num_ranks(section), 'rank')} cannot form groups of {named}"
            fix = f"write {name}.num_gpus_per_node={next_multiple(section.num_gpus_per_node, size)}"
            yield Problem(f"{name}.num_gpus_per_node", problem, fix)


@rule(tasks=TRAINED)
def batches_divide(run: Run) -> Iterator[Problem]:
    """train.batch_size = ranks x micro_batch_size x a whole number of micro-batches. Ranks that split the tokens of a
    batch count as one."""
    ranks = max(data_ranks(run, run.actor), 1)
    size, micro = run.train.batch_size, trained_micro_batches(run.train).rows
    if micro is None:
        if size % ranks:
            fix = f"write train.batch_size={next_multiple(size, ranks)}"
            yield Problem("train.batch_size", f"{size} is not a multiple of the actor's {ranks} ranks", fix)
    elif size % (ranks * micro):
        problem = f"{size} is not a multiple of train.micro_batch_size x ranks = {micro} x {ranks}"
        yield Problem("train.batch_size", problem, f"write train.batch_size={next_multiple(size, ranks * micro)}")


def parts(run: Run) -> dict[str, int]:
    """Return into how many parts the ranks of each model split a batch."""
    return {name: data_ranks(run, section) for name, section in ranked_sections(run).items()}


@rule(tasks=RL)
def rollouts_divide(run: Run) -> Iterator[Problem]:
    """Check that a step has a whole number of optimiser steps, and that the ranks of each model get equal shares."""
    samples = run.rollout.batch_size * run.rollout.n_samples_per_prompt
    said = f"{run.rollout.batch_size} prompts x {run.rollout.n_samples_per_prompt} samples = {samples}"
    if samples % run.train.batch_size:
        problem = f"{said} are not a multiple of train.batch_size={run.train.batch_size}"
        fix = "make rollout.batch_size x rollout.n_samples_per_prompt a multiple of train.batch_size"
        yield Problem("rollout.batch_size", problem, fix)
    for name, count in parts(run).items():
        if count and samples % count:
            fix = f"change rollout.batch_size, or {name}.num_nodes x {name}.num_gpus_per_node"
            yield Problem(f"{name}.num_gpus_per_node", f"{said} cannot be shared evenly by {count} ranks", fix)


@rule(tasks=RL)
def critic_batches_divide(run: Run) -> Iterator[Problem]:
    """Check a critic with another number of ranks than the actor; `batches_divide` checks the actor's."""
    count = parts(run).get("critic")
    if not count or count == parts(run)["actor"]:
        return
    share = count * (trained_micro_batches(run.train).rows or 1)
    if run.train.batch_size % share:
        problem = (
            f"train.batch_size={run.train.batch_size} is not a multiple of the critic's ranks x micro-batch = {share}"
        )
        yield Problem("critic.num_gpus_per_node", problem, "give the critic as many ranks as the actor")


@rule(tasks=RL)
def shared_devices_match(run: Run) -> Iterator[Problem]:
    sizes = {name: num_ranks(section) for name, section in ranked_sections(run).items()}
    engines = run.vllm.num_engines * run.vllm.devices
    groups = (
        ("colocate_all", run.train.colocate_all, sizes | {"vllm": engines}),
        ("colocate_actor_ref", run.train.colocate_actor_ref, subset(sizes, "actor", "ref")),
        ("colocate_critic_reward", run.train.colocate_critic_reward, subset(sizes, "critic", "reward")),
    )
    for name, is_on, members in groups:
        if is_on and len(set(members.values())) > 1:
            said = ", ".join(f"{member} {count}" for member, count in members.items())
            fix = "make num_nodes x num_gpus_per_node equal"
            if "vllm" in members:
                fix += ", and vllm.num_engines x vllm.tensor_parallel_size x vllm.pipeline_parallel_size"
            yield Problem(f"train.{name}", f"shared devices need equal numbers: {said}", fix)
            continue
        nodes = {member: section.num_nodes for member, section in ranked_sections(run).items() if member in members}
        if is_on and len(set(nodes.values())) > 1:
            said = ", ".join(f"{member} {count}" for member, count in nodes.items())
            yield Problem(f"train.{name}", f"shared devices need equal nodes: {said}", "make num_nodes equal")


@rule(tasks=RL)
def engines_fit_on_nodes(run: Run) -> Iterator[Problem]:
    """Check that no engine that shares the actor's devices, and that a node could hold, would have some of two."""
    wide, per_node = run.vllm.devices, run.actor.num_gpus_per_node
    if run.train.colocate_all and run.actor.num_nodes > 1 and wide < per_node and per_node % wide:
        key = "vllm.pipeline_parallel_size" if run.vllm.tensor_parallel_size == 1 else "vllm.tensor_parallel_size"
        problem = f"an engine of {wide} devices would be on two nodes of {per_node}, and wait for their network"
        fix = "make vllm.tensor_parallel_size x vllm.pipeline_parallel_size a divisor of "
        yield Problem(key, problem, f"{fix}actor.num_gpus_per_node={per_node}")


def subset(sizes: dict[str, int], *names: str) -> dict[str, int]:
    return {name: sizes[name] for name in names if name in sizes}


@rule(tasks=RL)
def older_rollouts_fit(run: Run) -> Iterator[Problem]:
    """Check that rollouts of another policy than the one that the loss compares with are corrected, and are trained on
    in time."""
    train, is_corrected = run.train, run.algo.advantage.is_correction_level != "off"
    if makes_rollouts_ahead(train) and train.async_queue_size > 0 and not is_corrected:
        problem = (
            f"rollouts by weights that are {train.async_queue_size} steps old are trained on as if the policy had "
        )
        problem += "written them, which makes training collapse"
        asked = "async_enable" if train.async_enable else "partial_rollout_enable"
        yield Problem(f"train.{asked}", problem, "add correction=tis (or icepop), or write train.async_queue_size=0")
    if train.partial_rollout_enable and 0 < train.async_queue_size < train.async_run_ahead:
        problem = f"groups that begin {train.async_run_ahead} steps ahead cannot be trained within "
        problem += f"train.async_queue_size={train.async_queue_size} steps"
        fix = f"write train.async_queue_size={train.async_run_ahead} or more, or a smaller train.async_run_ahead"
        yield Problem("train.async_run_ahead", problem, fix)


@rule(tasks=TRAINED)
def steps_count(run: Run) -> Iterator[Problem]:
    for key, steps in (("ckpt.save_steps", run.ckpt.save_steps), ("eval.steps", run.eval.steps)):
        if steps == 0:
            yield Problem(key, "0 is not an interval", f"write {key}=-1 (see --help) or a number of steps")


@rule(tasks=TRAINING)
def callbacks_differ(run: Run) -> Iterator[Problem]:
    """A checkpoint keeps the state of a callback by its name."""
    names = run.train.callbacks
    for name in dict.fromkeys(names):
        if names.count(name) > 1:
            yield Problem("train.callbacks", f"{name} is listed {names.count(name)} times", "list it once")


@rule(tasks=TRAINED)
def best_metric_is_measured(run: Run) -> Iterator[Problem]:
    """pass@k is measured for every power of two below eval.n_samples_per_prompt, and for that number."""
    key, name = "ckpt.best_metric_key", run.ckpt.best_metric_key
    if name in (None, NO_METRIC) or run.eval.dataset is None:
        return
    measured = [f"eval/{metric}" for metric in TASKS[run.task].evaluated]
    if run.task in RL:
        samples = run.eval.n_samples_per_prompt
        measured += [f"eval/pass{k}" for k in range(2, samples + 1) if k == samples or k & (k - 1) == 0]
    known = [metric for metric in measured if direction_of(metric) is not None]
    prefix, _, last = name.rpartition("/")
    if f"eval/{last}" in known and (sets := sets_of(run)) and prefix not in ("eval", *sets):
        problem = f"there is no evaluation set {prefix}; there are {', '.join(sets)}"
        yield Problem(
            key,
            problem,
            did_you_mean(name, [f"{name_of_set}/{last}" for name_of_set in sets]) or f"write {key}=eval/{last}",
        )
    elif not prefix.startswith("eval") or f"eval/{last}" not in known:
        fix = did_you_mean(name, known, f"{key}=") or f"write {key}={known[0]}, or none"
        problem = f"no evaluation of task={run.task} measures {name}; "
        if prefix.startswith("eval") and f"eval/{last}" in measured:
            problem = f"of {name} neither more nor less is better, so it cannot select a checkpoint; "
        yield Problem(key, f"{problem}it has {', '.join(known)}", fix)


def sets_of(run: Run) -> list[str]:
    """Return the beginnings of the metrics of each evaluation set. In task=ppo rows may name others (datasource), so
    the task itself looks for them when it has read its rows."""
    names = [] if run.task in RL else metric_names(names_in(run.eval.dataset))
    return [f"eval/{name}" for name in names]


@rule(tasks=RESUMABLE)
def allowed_changes_are_flags(run: Run) -> Iterator[Problem]:
    key, flags = "ckpt.allow_changes", flags_of(run.task)
    known = {*all_values(run), *flags}
    tables = tuple(f"{name}." for name, info in flags.items() if info.type.base is dict)  # an entry may be gone
    for name in run.ckpt.allow_changes:
        if (
            name not in known
            and not name.startswith(tables)
            and not any(flag_name.startswith(f"{name}.") for flag_name in known)
        ):
            unknown = unknown_flag(name, run.task)
            yield Problem(key, f"{name}: {unknown.what}", unknown.fix)
        elif resume_of(name, run.task) == FIXED:
            problem = f"{name} can never change: a checkpoint cannot be loaded with another value"
            yield Problem(key, problem, f"remove {name} from the list, or start a new run in another folder")


def sums_apart(ds: DeepSpeedConfig) -> bool:
    """Return whether DeepSpeed 0.19 trains by the optimiser that it has for ZeRO-1 where bf16 gradients are added up in
    fp32 on the device."""
    return ds.zero_stage == 1 and (ds.param_dtype, ds.grad_accum_dtype) == ("bf16", "fp32") and not ds.adam_offload


@rule(tasks=TRAINED)
def reduction_has_hooks(run: Run) -> Iterator[Problem]:
    """Check that gradients are reduced by ZeRO's own optimiser where they are reduced during a backward pass, or by a
    compiled graph."""
    if not sums_apart(run.ds):
        return
    if run.ds.overlap_comm:
        problem = "ZeRO-1 with bf16 parameters and ds.grad_accum_dtype=fp32 reduces after the last backward pass"
        fix = "write ds.zero_stage=2, ds.grad_accum_dtype=bf16, or ds.overlap_comm=false"
        yield Problem("ds.overlap_comm", problem, fix)
    if run.ds.deepcompile:
        problem = "DeepSpeed does not compile ZeRO-1 with bf16 parameters and ds.grad_accum_dtype=fp32"
        yield Problem("ds.deepcompile", problem, "write ds.zero_stage=2, or ds.deepcompile=false")
