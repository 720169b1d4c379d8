"""Annotations: what frozen models say of every sequence, computed once before training and cached on disk by content.

The name of the file is a digest of the models' weights, the precision and every token and mask: another model or other
data is another file. One number per sequence and annotation, in the order of the sequences.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import chain
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from rlhf_suite.config.declarations.runs import Run
from rlhf_suite.config.plan.run_plan import ModelPlan
from rlhf_suite.data.batch import Group, Item, require_column, sequences
from rlhf_suite.data.combine import LazySequence
from rlhf_suite.disk import cache_folder, file_aside
from rlhf_suite.models.host_weights import on_device
from rlhf_suite.models.load import model_digest
from rlhf_suite.train.frozen import load_frozen_roles
from rlhf_suite.train.loader import rank_micro_batches
from rlhf_suite.train.step import equalise
from rlhf_suite.train.strategy import TrainedModel
from rlhf_suite.train.task import Task, mark_counted

Annotations = dict[str, torch.Tensor]  # each [number of sequences]


def annotate_once(
    task: Task,
    config: Run,
    models: Mapping[str, ModelPlan],
    actor: TrainedModel,
    sets: Mapping[str, Sequence[Item]],
) -> dict[str, Sequence[Item]]:
    """Return the sets with every sequence annotated. The frozen models are loaded only if a file is missing, and are
    freed afterwards."""
    files = {name: cache_file(task, config, models, items) for name, items in sets.items()}
    annotations = {name: load_file(file) for name, file in files.items() if file.exists()}
    some_are_missing = torch.tensor(float(len(annotations) < len(files)))
    if actor.world.max(some_are_missing) > 0:  # on any rank: their caches may be on different disks
        task.frozen = load_frozen_roles(task, models, actor)
        for name, items in sets.items():
            with on_device(*task.frozen.values()):
                annotations[name] = annotate_all(task, config, actor, items)
            if actor.world.is_main:
                with file_aside(files[name]) as aside:
                    save_file(annotations[name], aside)
        task.frozen = {}
    return {name: WithAnnotations(items, annotations[name]) for name, items in sets.items()}


def cache_file(task: Task, config: Run, models: Mapping[str, ModelPlan], items: Sequence[Item]) -> Path:
    """Return the file where the annotations of `items` are, or will be."""
    ds = config.ds
    digest = hashlib.sha256(f"{ds.param_dtype} {ds.load_in_4bit} {ds.attn_implementation}".encode())
    for name, role in sorted(task.roles().items()):
        digest.update(f"{name} {model_digest(models[role].path, models[role].flag)}".encode())
    for example in chain.from_iterable(map(sequences, items)):
        digest.update(torch.tensor([len(example), *example.ids, *example.mask]).numpy().tobytes())
        for image in example.images or ():
            digest.update(hashlib.sha256(image.data).digest())
    return cache_folder("annotations") / f"{digest.hexdigest()}.safetensors"


@torch.no_grad()
def annotate_all(task: Task, config: Run, actor: TrainedModel, items: Sequence[Item]) -> Annotations:
    """Return `task.annotate` of all sequences; the ranks share the work and each gets all of it. Needs
    `task.frozen`."""
    ends = torch.tensor([len(sequences(item)) for item in items]).cumsum(0)
    result: Annotations = {}
    for start in range(0, len(items), config.train.batch_size):
        chosen = range(start, min(start + config.train.batch_size, len(items)))
        batches = rank_micro_batches(items, chosen, config.train, actor.world, actor.module.packed)
        for batch in equalise(actor, batches):
            values = task.annotate(batch.to(actor.world.device))
            for name in values:
                result.setdefault(name, torch.zeros(int(ends[-1]), dtype=torch.float64))
            if mark_counted(batch).any():  # else it stands in for no work
                rows = require_column(batch.index, "index").unique_consecutive().tolist()
                places = [p for row in rows for p in range(int(ends[row]) - len(sequences(items[row])), int(ends[row]))]
                for name, value in values.items():
                    result[name][places] = value.double().cpu()
    return {name: actor.world.sum(value).cpu() for name, value in sorted(result.items())}


class WithAnnotations(LazySequence[Item]):
    """Items whose sequences have their annotations among their numbers; an item is put together when it is read."""

    def __init__(self, items: Sequence[Item], annotations: Annotations) -> None:
        self.items, self.annotations = items, annotations
        self.ends = torch.tensor([len(sequences(item)) for item in items]).cumsum(0)

    def __len__(self) -> int:
        return len(self.items)

    def at(self, place: int) -> Item:
        item, end = self.items[place], int(self.ends[place])
        examples = sequences(item)
        annotated = tuple(
            replace(example, numbers=example.numbers | {k: float(v[number]) for k, v in self.annotations.items()})
            for number, example in enumerate(examples, start=end - len(examples))
        )
        return Group(annotated) if isinstance(item, Group) else annotated[0]
