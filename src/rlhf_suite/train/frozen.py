"""The models that a supervised task only reads: a frozen reference or teacher, or the actor without its adapters."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch

from rlhf_suite.config.runs import SupervisedRun
from rlhf_suite.models.lora import adapters_disabled
from rlhf_suite.train.step import equalise
from rlhf_suite.train.strategy import TrainedModel, load_frozen
from rlhf_suite.train.task import Forward, FrozenRole, SupervisedBatch, Task


def load_frozen_roles(task: Task, config: SupervisedRun, actor: TrainedModel) -> Mapping[str, Forward]:
    """The models of `task.roles()`."""
    return {name: load_role(role, config, actor) for name, role in task.roles().items()}


def load_role(role: FrozenRole, config: SupervisedRun, actor: TrainedModel) -> Forward:
    """The actor's starting weights are its own where only adapters are trained: no second copy is loaded."""
    start = config.actor.model_name_or_path
    if config.ds.lora.rank > 0 and role.path in (None, start):
        return WithoutAdapters(actor)
    path = role.path or start
    assert path is not None
    return load_frozen(path, "lm", config.ds, actor.world, role.flag, role.offload)


class WithoutAdapters:
    """A trained model as it was before its adapters."""

    def __init__(self, model: TrainedModel) -> None:
        self.model = model

    def __call__(self, *args: object, **kwargs: object) -> object:
        training = self.model.module.training
        self.model.module.eval()
        try:
            with adapters_disabled(self.model.module):
                return self.model(*args, **kwargs)
        finally:
            self.model.module.train(training)


@torch.no_grad()
def prepared(task: Task, actor: TrainedModel, batches: list[SupervisedBatch]) -> list[SupervisedBatch]:
    """A step's micro-batches with what their losses read beside the tokens; untouched for a task of one model."""
    if not task.roles():
        return batches
    world = actor.world
    batches = [annotated(task, batch.to(world.device)) for batch in equalise(actor, batches)]
    return task.before_step(actor, batches, world.sum)


def annotated(task: Task, batch: SupervisedBatch) -> SupervisedBatch:
    """The batch with what the frozen models say of its sequences, unless it was said before training."""
    if not task.frozen:
        return batch
    return replace(batch, **task.annotate(batch))
