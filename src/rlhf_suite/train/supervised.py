"""The run of a supervised task: its data in the driver, its model in this process or on a group of workers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from rlhf_suite.config.check.sources import metric_names
from rlhf_suite.config.declarations.runs import Run
from rlhf_suite.config.plan.run_plan import ACTOR, WorkerPlan, actor_path
from rlhf_suite.data.batch import Item
from rlhf_suite.data.packing import PackedRows
from rlhf_suite.data.row import BadRows
from rlhf_suite.data.sources import EVAL, Sources, source_names
from rlhf_suite.distributed.mesh import Rank
from rlhf_suite.distributed.ranks import start_ranks
from rlhf_suite.distributed.worker import keep_from_collections
from rlhf_suite.distributed.world import seed_process
from rlhf_suite.models.host_weights import on_device
from rlhf_suite.models.load import load_tokenizer
from rlhf_suite.models.prompt_format import format_of
from rlhf_suite.run_folders.run_folder import RunFolder
from rlhf_suite.tracking.journal import Journal
from rlhf_suite.train.annotations import annotate_once
from rlhf_suite.train.callbacks import Callbacks
from rlhf_suite.train.evaluate import Evaluation, evaluate
from rlhf_suite.train.export import export
from rlhf_suite.train.frozen import load_frozen_roles, prepare_batches
from rlhf_suite.train.loader import StepLoader
from rlhf_suite.train.loop import Trainer
from rlhf_suite.train.notices import (
    batch_notices,
    chat_template_notices,
    describe_matrices,
    describe_rows,
    embedding_notices,
)
from rlhf_suite.train.saving import Saver, TrainingRows
from rlhf_suite.train.step import optimizer_step
from rlhf_suite.train.strategy import join_world, load_trained
from rlhf_suite.train.task import SupervisedBatch, Task, count_tokens
from rlhf_suite.train.trained_worker import SupervisedGroup, TrainedWorker

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

R = TypeVar("R", bound=Run)
MakeTask = Callable[[R, "PreTrainedTokenizerBase"], Task]


@dataclass(frozen=True)
class Encoded:
    """Items to train on, and held-out items by the name of their source."""

    train: Sequence[Item]
    held_out: dict[str, Sequence[Item]]
    contents_digest: str = ""  # of the files that the training items come from


class SupervisedWorker(TrainedWorker):
    """One rank of a supervised run."""

    def __init__(self, rank: Rank, config: R, plan: WorkerPlan, make_task: MakeTask[R], data: Encoded) -> None:
        super().__init__(rank)
        ds = plan.hold(config.ds)
        world = join_world(rank, ds.zero_stage)
        seed_process(config.train, world)
        self.config, self.plan, self.data = config, plan, data
        self.loader = StepLoader(data.train, config.train, world)
        self.tokenizer = load_tokenizer(plan.models[ACTOR].path, config.data)
        self.task, self.prompts = make_task(config, self.tokenizer), format_of(config)
        self.model = load_trained(
            plan.models[ACTOR],
            config.actor,
            ds,
            world,
            total_steps=self.loader.total_steps,
            seed=config.train.seed,
        )
        if self.task.annotates_once:
            sets = annotate_once(self.task, config, plan.models, self.model, {"": data.train, **data.held_out})
            self.data = Encoded(sets.pop(""), sets)
            self.loader = StepLoader(self.data.train, config.train, world)
        else:
            self.task.frozen = load_frozen_roles(self.task, plan.models, self.model)
        keep_from_collections()

    def steps(self) -> tuple[int, int]:
        """Return the optimiser steps of the run, and those of an epoch."""
        return self.loader.total_steps, self.loader.order.steps_per_epoch

    def train_step(self, step: int) -> dict[str, float]:
        """Take optimiser step `step` (0-based) and return its metrics."""
        loaded = self.loader.step(step, self.model.module.packed)
        world, batches = self.model.world, self.prepare(loaded)
        policy, name = self.config.train.on_nonfinite, lambda index: self.data.train[index].where
        with on_device(*self.task.read_by_loss()):
            metrics = optimizer_step(self.model, self.task, batches, step, policy, name)
        metrics["tokens"] = float(world.sum(torch.stack([count_tokens(batch) for batch in loaded]).sum()))
        metrics["samples"] = float(len(self.loader.order.indices(step)))
        result = {f"train/{name}": value for name, value in metrics.items()}
        return result | {"perf/memory_gb": world.peak_memory_gb()}

    def begin_evaluation(self) -> int:
        """Begin to measure the held-out sets; return in how many parts that is done."""
        self.evaluation = Evaluation(self.model, self.task, self.data.held_out, self.config.train, self.prepare)
        return len(self.evaluation.parts)

    def evaluate_part(self, part: int) -> None:
        """Measure a part (0-based) of the held-out sets."""
        with on_device(*self.task.read_by_loss()):
            self.evaluation.measure(part)

    def end_evaluation(self) -> dict[str, float]:
        """Return the metrics of the task on the held-out sets."""
        return self.evaluation.result()

    def prepare(self, batches: list[SupervisedBatch]) -> list[SupervisedBatch]:
        return prepare_batches(self.task, self.model, batches)

    def export(self, path: Path) -> list[str]:
        """Write the model in HF format, with what its task adds to config.json."""
        return export(self.model, self.tokenizer, path, self.extras, self.prompts)

    def extras(self) -> dict[str, Any]:
        """Return what config.json says beside the architecture."""
        extras = dict(self.task.extras())
        if self.plan.models[ACTOR].head == "value":
            extras["reward_mean"], extras["reward_std"] = self.reward_stats()
        return extras

    def reward_stats(self) -> tuple[float, float]:
        """Return mean and standard deviation of the scores of the held-out sets, or of the training set without one."""
        sets = self.data.held_out or {"train": self.data.train}
        metrics = evaluate(self.model, self.task, sets, self.config.train, self.prepare)
        return metrics["eval/reward_mean"], max(metrics["eval/reward_std"], 1e-8)


def run_supervised(config: R, folder: Path, plan: WorkerPlan, make_task: MakeTask[R]) -> dict[str, float]:
    """Encode the data, train, and return the last metrics."""
    tokenizer = load_tokenizer(actor_path(config), config.data)
    task = make_task(config, tokenizer)
    run_folder, journal = RunFolder(folder), Journal(config.logger, RunFolder(folder), config.task)
    data = encode(config, make_task, task, journal)
    for notice in notices(config, tokenizer, len(data.train)):
        journal.warn(notice)
    for line in (*describe_rows(config, plan), *describe_matrices(config, plan)):
        journal.info(line)
    settings = (config, plan, make_task, data)
    with start_ranks(SupervisedWorker, plan.placement, config.launch, run_folder, settings) as ranks:
        group = SupervisedGroup(ranks)
        total_steps, steps_per_epoch = group.steps()
        rows = TrainingRows("data.dataset", data.contents_digest)
        callbacks = Callbacks(config.train.callbacks)
        state = {"callbacks": callbacks}
        saver = Saver(config.ckpt, run_folder, {"actor": group}, f"eval/{task.main_metric}", rows, state)
        try:
            return Trainer(
                train=config.train,
                evaluation=config.eval,
                saver=saver,
                journal=journal,
                total_steps=total_steps,
                callbacks=callbacks,
                group=group,
                steps_per_epoch=steps_per_epoch,
            ).run()
        finally:
            journal.close()


def encode(config: R, make_task: MakeTask[R], task: Task, journal: Journal) -> Encoded:
    """Encode all rows as items; rows that cannot be used are counted, and reported."""
    from rlhf_suite.data.load import Loader  # pyarrow: a worker that is given its items needs none

    data, seed = config.data, config.train.seed
    bad = BadRows(data.on_bad_row)
    assert data.dataset is not None
    sources = Sources(data.dataset, data.dataset_split, data.max_samples, data.dataset_probs)
    loader = Loader(task.encoder, data, seed, bad, journal.track)
    items = in_rows(task.assemble(loader.load(sources)), config, journal)
    contents_digest = loader.contents_digest
    held_out: dict[str, Sequence[Item]] = {}
    names = source_names(config.eval.dataset or "")
    for name, source, columns in zip(metric_names(names), names, config.eval.columns_of_sets(len(names)), strict=True):
        sources = Sources(source, config.eval.split, config.eval.max_samples, flags=EVAL)
        own = with_columns(config, make_task, task, columns)
        loader = replace(loader, encoder=own.encoder)
        held_out[name] = in_rows(own.assemble(loader.load(sources)), config, journal)
    journal.info(bad.summary())
    return Encoded(items, held_out, contents_digest)


def notices(config: Run, tokenizer: PreTrainedTokenizerBase, rows: int) -> Iterator[str]:
    """Return what the user should know before the run trains."""
    yield from embedding_notices(tokenizer, actor_path(config))
    if not config.actor.pretrains:
        yield from chat_template_notices(tokenizer, config.data, actor_path(config))
    yield from batch_notices("train.batch_size", config.train.batch_size, rows, "rows")


def with_columns(config: R, make_task: MakeTask[R], task: Task, columns: dict[str, Any]) -> Task:
    """Return the task for an evaluation set that has other names for some columns than the training data."""
    if not columns:
        return task
    tokenizer = load_tokenizer(actor_path(config), config.data)
    return make_task(replace(config, data=replace(config.data, **columns)), tokenizer)


def in_rows(items: Sequence[Item], config: Run, journal: Journal) -> Sequence[Item]:
    """Return the items, several to a row of data.max_len tokens where data.pack_to_max_len asks for it."""
    if not config.data.has("pack_to_max_len") or not config.data.pack_to_max_len:
        return items
    rows = PackedRows(items, config.data.max_len)
    journal.info(rows.summary())
    return rows
