"""Rules about the models of a run: their names, precision, attention, optimisers and what is frozen."""

from __future__ import annotations

import re
from collections.abc import Iterator

from rlhf_suite.config.check.formatting import did_you_mean, number_of
from rlhf_suite.config.check.problems import Problem, rule
from rlhf_suite.config.check.sources import BUILTIN
from rlhf_suite.config.declarations.ds import ATTENTION, HUB_KERNELS, is_flash
from rlhf_suite.config.declarations.flags import all_values
from rlhf_suite.config.declarations.models import SEEING_MODEL
from rlhf_suite.config.declarations.runs import TASKS, Run
from rlhf_suite.config.declarations.task_groups import RL, SEEING, TRAINED
from rlhf_suite.config.plan.run_plan import has_ranks, is_actor, model_sections, num_ranks


@rule()
def model_is_named(run: Run) -> Iterator[Problem]:
    task = TASKS[run.task]
    if task.model.endswith("model_name_or_path") and all_values(run)[task.model] is None:
        demo = f", or demo={run.task} for a small built-in example" if task.has_demo else ""
        yield Problem(task.model, "no model is named", f"add {task.model}=<HF folder or hub name>{demo}")


@rule(tasks=("distill",))
def teacher_is_named(run: Run) -> Iterator[Problem]:
    if run.teacher.model_name_or_path is None:
        key = "teacher.model_name_or_path"
        yield Problem(key, "no teacher is named", f"add {key}=<HF folder or hub name>")


@rule(tasks=(*TRAINED, "serve_rm"))
def attention_is_known(run: Run) -> Iterator[Problem]:
    key, name = "ds.attn_implementation", run.ds.attn_implementation
    if name is not None and not is_flash(name) and name not in ATTENTION:
        known = f"{', '.join(ATTENTION)} and {HUB_KERNELS}<name>"
        fix = did_you_mean(name, ATTENTION, f"{key}=") or f"write {key}=varlen"
        yield Problem(key, f"{name} is not known; there are {known}", fix)


@rule(tasks=SEEING)
def model_reads_images(run: Run) -> Iterator[Problem]:
    path = run.actor.model_name_or_path
    if run.data.image_key is not None and path is not None and path.startswith(BUILTIN) and path != SEEING_MODEL:
        key = "actor.model_name_or_path"
        yield Problem(
            key,
            f"{path} reads no images, and data.image_key is set",
            f"write {key}={SEEING_MODEL}, or data.image_key=null",
        )


@rule(tasks=RL)
def policy_is_not_drawn(run: Run) -> Iterator[Problem]:
    if run.ds.lora.rank > 0 and run.ds.lora.dropout > 0:
        problem = (
            f"{run.ds.lora.dropout} would train in every forward pass a policy that differs from the one that sampled"
        )
        yield Problem("ds.lora.dropout", problem, "write ds.lora.dropout=0.0")


@rule(tasks=TRAINED)
def models_can_be_trained(run: Run) -> Iterator[Problem]:
    sections = {"actor": run.actor} | ({"critic": run.critic} if run.task in RL else {})
    for name, section in sections.items():
        if len(section.adam.betas) != 2:
            problem = f"needs 2 values, not {len(section.adam.betas)}"
            yield Problem(f"{name}.adam.betas", problem, f"write '{name}.adam.betas=[0.9,0.95]'")
        for pattern in section.freeze:
            try:
                re.compile(pattern)
            except re.error as error:
                problem = f"{pattern!r} is not a regular expression: {error}"
                yield Problem(f"{name}.freeze", problem, f"write '{name}.freeze=[model.embed_tokens]'")


@rule(tasks=TRAINED)
def reference_has_weights_of_its_own(run: Run) -> Iterator[Problem]:
    for name, section in model_sections(run).items():
        if getattr(section, "offload", False) and is_actor(run, name, section):
            problem = "with LoRA this model is the actor without its adapters, and no copy is held"
            yield Problem(f"{name}.offload", problem, f"write {name}.offload=false")


@rule(tasks=RL)
def actor_has_its_ranks(run: Run) -> Iterator[Problem]:
    """Check that a frozen model that is the actor without its adapters is asked for no other ranks than the actor's."""
    for name, section in model_sections(run).items():
        if has_ranks(section) and is_actor(run, name, section):
            ranks, own = num_ranks(section), num_ranks(run.actor)
            if ranks not in (1, own):
                problem = (
                    f"with LoRA this model is the actor without its adapters, on the actor's {number_of(own, 'rank')}"
                )
                fix = f"remove {name}.num_nodes and {name}.num_gpus_per_node"
                yield Problem(f"{name}.num_gpus_per_node", f"{problem}, and asked for {ranks}", fix)
