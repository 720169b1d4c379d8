"""Rules about images: which models read them, and what has not been made to work with them."""

from __future__ import annotations

from collections.abc import Iterator

from rlhf_suite.config.check.problems import Problem, rule
from rlhf_suite.config.check.sources import BUILTIN
from rlhf_suite.config.declarations.models import SEEING_MODEL
from rlhf_suite.config.declarations.runs import Run
from rlhf_suite.config.declarations.task_groups import RL, SEEING
from rlhf_suite.config.plan.run_plan import model_sections

KEY = "data.image_key"
WITHOUT = f"write {KEY}=null"


@rule(tasks=SEEING)
def model_reads_images(run: Run) -> Iterator[Problem]:
    path = run.actor.model_name_or_path
    if run.data.image_key is not None and path is not None and path.startswith(BUILTIN) and path != SEEING_MODEL:
        key = "actor.model_name_or_path"
        yield Problem(key, f"{path} reads no images, and {KEY} is set", f"write {key}={SEEING_MODEL}, or {KEY}=null")


@rule(tasks=SEEING)
def ranks_hold_whole_images(run: Run) -> Iterator[Problem]:
    if run.data.image_key is not None and run.ds.ring_attn_size > 1:
        problem = f"the tokens of an image are not split over {run.ds.ring_attn_size} ranks"
        yield Problem("ds.ring_attn_size", problem, "write ds.ring_attn_size=1")
    if run.data.image_key is not None and run.ds.tensor_parallel_size > 1:
        problem = f"the matrices of a model that reads images are not split over {run.ds.tensor_parallel_size} ranks"
        yield Problem("ds.tensor_parallel_size", problem, "write ds.tensor_parallel_size=1")


@rule(tasks=SEEING)
def experts_are_not_balanced(run: Run) -> Iterator[Problem]:
    """Refuse the loss of the balance of experts, which would count the blank image of a batch without one."""
    if run.data.image_key is None:
        return
    for name, section in model_sections(run).items():
        if getattr(section, "aux_loss_coef", 0) > 0:
            problem = "the load of experts is not balanced in batches with images"
            yield Problem(f"{name}.aux_loss_coef", problem, f"write {name}.aux_loss_coef=0")


@rule(tasks=("distill",))
def distillation_reads_text(run: Run) -> Iterator[Problem]:
    if run.data.image_key is not None:
        yield Problem(KEY, "task=distill reads text alone", WITHOUT)


@rule(tasks=RL)
def others_need_no_images(run: Run) -> Iterator[Problem]:
    """Refuse what would read the tokens of images as text, or has not been compared with the engines."""
    if run.data.image_key is None:
        return
    if run.algo.distill.coef > 0:
        problem = "a teacher that reads images has not been tested"
        yield Problem("algo.distill.coef", problem, "write algo.distill.coef=0")
    if run.reward.process.enable:
        problem = "a process reward model reads text alone, and would take the tokens of images for text"
        yield Problem("reward.process.enable", problem, "write reward.process.enable=false")
    if run.agent.needs("text"):
        problem = "programs behind the endpoint send and get text alone"
        yield Problem("agent.kind", problem, "write agent.kind=environment")
    if run.agent.has_turns and run.agent.history == "template":
        problem = "a conversation with images is not rendered again"
        yield Problem("agent.history", problem, "write agent.history=append")
