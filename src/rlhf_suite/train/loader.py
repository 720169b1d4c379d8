"""Which rows each rank trains on at each step: a pure function of the step number, so a resume is one integer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch

from rlhf_suite.config.declarations.train import TrainConfig
from rlhf_suite.config.plan.micro_batches import MicroBatches, trained_micro_batches
from rlhf_suite.data.batch import Item, collate, sequences, weightless
from rlhf_suite.data.packing import balance, micro_batches
from rlhf_suite.data.sampler import BatchOrder
from rlhf_suite.distributed.mesh import Mesh
from rlhf_suite.distributed.world import World
from rlhf_suite.train.task import SupervisedBatch


class StepLoader:
    """Micro-batches of this rank for every optimiser step. All ranks hold all examples and make the same split."""

    def __init__(self, examples: Sequence[Item], config: TrainConfig, world: World) -> None:
        self.examples, self.config, self.world = examples, config, world
        self.order = BatchOrder(len(examples), config.batch_size, config.seed)

    @property
    def total_steps(self) -> int:
        steps = self.order.steps_per_epoch * self.config.max_epochs
        return min(steps, self.config.max_steps or steps)

    def step(self, step: int, packed: bool = True) -> list[SupervisedBatch]:
        """Return the micro-batches of this rank for optimiser step `step` (0-based), for a model that takes sequences
        `packed` or pads them."""
        chosen = self.order.indices(step)
        return rank_micro_batches(self.examples, chosen, self.config, self.world, packed)


def rank_micro_batches(
    examples: Sequence[Item], chosen: Sequence[int], config: TrainConfig, world: World, packed: bool = True
) -> list[SupervisedBatch]:
    """Return this rank's part of the chosen examples as micro-batches; ranks get about equal token counts. The
    sequences of a group stay together, and count as one in `train.micro_batch_size`."""
    items = {i: examples[i] for i in chosen}  # read once: they may be on disk
    lengths = [len(items[i]) for i in chosen]
    parts = balance(lengths, world.mesh.data) if world.mesh.data > 1 else [list(range(len(chosen)))]
    part = parts[world.data_index]
    if not part:  # fewer sequences than ranks: take part in the collectives with a sequence that weighs nothing
        return [weightless(collate_indexed(items, [chosen[0]]))]
    mine = [chosen[i] for i in part]
    widths = [len(items[i]) if packed else padded_length(items[i]) for i in mine]
    groups = micro_groups(widths, trained_micro_batches(config), world.mesh, packed)
    return [collate_indexed(items, [mine[i] for i in group]) for group in groups]


def padded_length(item: Item) -> int:
    """Return the tokens of an item whose sequences are padded to the longest of them."""
    lengths = [len(sequence) for sequence in sequences(item)]
    return len(lengths) * max(lengths)


def micro_groups(
    lengths: Sequence[int],
    limit: MicroBatches,
    mesh: Mesh,
    packed: bool = True,
    order: Sequence[int] | None = None,
) -> list[list[int]]:
    """Return which of a rank's rows share a micro-batch. A budget of tokens is that of one GPU, and several may split
    the tokens. `order`: neighbours in it are better together."""
    if limit.tokens is not None:
        return micro_batches(lengths, token_budget=limit.tokens * mesh.sequence, padded=not packed, order=order)
    return micro_batches(lengths, count=limit.rows)


def collate_indexed(examples: Mapping[int, Item], indices: Sequence[int]) -> SupervisedBatch:
    """Return a batch that remembers in `index` which examples its sequences belong to."""
    chosen = [(index, sequence) for index in indices for sequence in sequences(examples[index])]
    batch = collate([sequence for _, sequence in chosen], SupervisedBatch)
    return replace(batch, index=torch.tensor([index for index, _ in chosen]))
