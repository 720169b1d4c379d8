"""The models that a supervised task only reads: a frozen reference or teacher, or the actor without its adapters."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch

from rlhf_suite.config.plan.run_plan import ModelPlan
from rlhf_suite.models.host_weights import on_device
from rlhf_suite.models.lora import disable_adapters
from rlhf_suite.train.step import equalise
from rlhf_suite.train.strategy import TrainedModel, load_frozen
from rlhf_suite.train.task import Forward, SupervisedBatch, Task


def load_frozen_roles(task: Task, models: Mapping[str, ModelPlan], actor: TrainedModel) -> Mapping[str, Forward]:
    """Load those of the `models` of a run that the task only reads, as the actor is held."""
    return {name: load_role(models[role], actor) for name, role in task.roles().items()}


def load_role(model: ModelPlan, actor: TrainedModel) -> Forward:
    """Load a frozen model, unless it is the actor without its adapters."""
    return WithoutAdapters(actor) if model.is_actor else load_frozen(model, actor.ds, actor.world)


class WithoutAdapters:
    """A trained model as it was before its adapters."""

    def __init__(self, model: TrainedModel) -> None:
        self.model = model

    def __call__(self, *args: object, **kwargs: object) -> object:
        training = self.model.module.training
        self.model.module.eval()
        try:
            with disable_adapters(self.model.module):
                return self.model(*args, **kwargs)
        finally:
            self.model.module.train(training)


@torch.no_grad()
def prepare_batches(task: Task, actor: TrainedModel, batches: list[SupervisedBatch]) -> list[SupervisedBatch]:
    """Return the micro-batches of a step with what their losses read beside the tokens."""
    if not task.roles():
        return batches
    world = actor.world
    with on_device(*task.frozen.values()):
        batches = [annotate(task, batch.to(world.device)) for batch in equalise(actor, batches)]
    return task.before_step(actor, batches, world.sum)


def annotate(task: Task, batch: SupervisedBatch) -> SupervisedBatch:
    """Return the batch with what the frozen models say of its sequences, unless that was done before training."""
    if not task.frozen:
        return batch
    columns: dict[str, Any] = dict(task.annotate(batch))
    return replace(batch, **columns)
