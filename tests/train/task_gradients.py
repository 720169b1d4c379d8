"""The gradient of a step of every supervised task, however the step is computed, and that of its formula."""

from __future__ import annotations

import importlib
import random
from pathlib import Path

import torch
from gradients import ds_config, gradient_writer, train_config, trained_model, written
from plain_models import Gradients, balancing, formula_gradient, reference_model
from splits import Split
from task_cases import CASES, Plain

from rlhf_suite.config.declarations.data import DataConfig
from rlhf_suite.config.declarations.runs import Run
from rlhf_suite.config.plan.run_plan import models
from rlhf_suite.data.batch import Item, sequences
from rlhf_suite.data.packing import PackedRows
from rlhf_suite.data.row import Row
from rlhf_suite.distributed.world import World
from rlhf_suite.models.load import load_tokenizer
from rlhf_suite.train.frozen import load_frozen_roles, prepare_batches
from rlhf_suite.train.loader import rank_micro_batches
from rlhf_suite.train.step import optimizer_step
from rlhf_suite.train.task import Task

BUDGET = 160  # tokens of a micro-batch


def setup(folder: Path, name: str, split: Split) -> tuple[Run, Task, list[Item]]:
    """The configuration, the task and the items of `split`'s step."""
    case = CASES[name]
    config = case.config(folder, {"train": train_config(split, BUDGET), "ds": ds_config(split)})
    config.actor.aux_loss_coef = split.aux
    make_task = importlib.import_module(f"rlhf_suite.tasks.{config.task}").make_task
    task = make_task(config, load_tokenizer(str(folder / "plain"), DataConfig.of("sft")))
    rows = [Row(values, "rows", line) for line, values in enumerate(case.rows(random.Random(4)))]
    items = list(task.assemble([task.encoder.encode(row) for row in rows]))
    return config, task, [items[row] for row in split.chosen(len(items))]


def gradient(world: World, folder: Path, name: str, split: Split, capacity: int = 0) -> Gradients | None:
    """The gradient that the optimiser is given, by the names of a plain transformers model; rank 0's. With `capacity`
    the same items come in rows of so many tokens."""
    torch.manual_seed(0)
    config, task, items = setup(folder, name, split)
    if capacity:
        items = PackedRows(items, capacity)
    with gradient_writer():
        model = trained_model(world, folder, models(config)["actor"].head, split)
    task.frozen = load_frozen_roles(task, models(config), model)
    packed = model.module.packed
    batches = rank_micro_batches(items, range(len(items)), config.train, model.world, packed)
    batches = prepare_batches(task, model, batches)
    optimizer_step(model, task, batches, 0, "stop")
    return written(model)


def wanted(folder: Path, name: str, split: Split) -> Gradients:
    """The gradient of the formula; with LoRA of the adapters, and the reference is the model without them."""
    config, _, items = setup(folder, name, split)
    other = Plain(reference_model(folder, "lm" if split.lora else "reference").requires_grad_(False))

    def total(model: torch.nn.Module) -> torch.Tensor:
        loss = CASES[name].formula(Plain(model), other, items)
        if split.aux == 0:
            return loss
        trained = [each for item in items for each in (sequences(item)[:1] if name == "kto" else sequences(item))]
        return loss + split.aux * balancing(model, [torch.tensor(each.ids) for each in trained])

    return formula_gradient(reference_model(folder, models(config)["actor"].head), split.lora, total)
