"""The interface of a supervised task: what it trains on and what it minimises."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Protocol, TypeVar

import torch

from rlhf_suite.data.batch import Item, PerRow, PerToken, TokenBatch
from rlhf_suite.data.encode import Encoder
from rlhf_suite.losses.metrics import Metric
from rlhf_suite.losses.reduce import LossSum, mark_counted_sequences

Forward = Callable[..., object]
Total = Callable[[torch.Tensor], torch.Tensor]  # the sum over the ranks
B_contra = TypeVar("B_contra", bound=TokenBatch, contravariant=True)


@dataclass(frozen=True)
class SupervisedBatch(TokenBatch):
    """Encoded rows, with what the supervised tasks read beside their tokens; a column has the name that the encoder, or
    `Task.annotate`, gave it."""

    target: PerToken = None  # [T] prm: the reward token that is right at a placeholder
    weight: PerToken = None  # [T] prm: the probability of `target`; 1 for hard labels
    margin: PerRow = None  # [B] rm: by how much the chosen answer is to win
    label: PerRow = None  # [B] kto: 1 desirable, 0 not
    reference: PerRow = None  # [B] dpo, kto: the reference model's log-prob of the answer
    kl: PerRow = None  # [B] kto: the reference point of the step


@dataclass(frozen=True)
class StepLoss:
    """The loss of one micro-batch: for each unit (`tokens`, `sequences`, ...) the SUM over the units in it, with
    gradient. The step's loss is the sum over units of total / count, with counts over all micro-batches and ranks."""

    sums: dict[str, torch.Tensor]
    metrics: Mapping[str, Metric]

    @classmethod
    def of(cls, unit: str, loss: LossSum) -> StepLoss:
        """Return the step loss of a loss over one unit."""
        return cls({unit: loss.total}, loss.metrics)


class Objective(Protocol[B_contra]):
    """What an optimiser step minimises."""

    def units(self, batch: B_contra) -> dict[str, torch.Tensor]:
        """Return how many of each unit the batch holds; this is known before any forward pass."""
        ...

    def loss(self, model: Forward, batch: B_contra) -> StepLoss:
        """Run the model once; return sums of losses, and metrics. The step itself adds the load-balancing loss."""
        ...


class Task:
    """A supervised task: it turns rows into items, and has the objective over them. Most tasks define `encoder`,
    `units` and `loss` alone."""

    encoder: Encoder[Item]  # tokens and mask of a row, or of each sequence of its group
    main_metric: str = "loss"  # of the evaluation, by which the best checkpoint is chosen
    frozen: Mapping[str, Forward] = MappingProxyType({})  # the models of `roles`, there when `annotate` is called
    annotates_once: bool = False  # before training and on disk, instead of in every step

    def assemble(self, items: Sequence[Item]) -> Sequence[Item]:
        """Return the items to train on, made from all encoded rows of a source."""
        return items

    def roles(self) -> dict[str, str]:
        """Return the names in the plan of the models that are only read, by what the task calls them."""
        return {}

    def annotate(self, batch: SupervisedBatch) -> dict[str, torch.Tensor]:
        """Return row columns that the frozen models compute, each [B], from each sequence alone. No gradient."""
        return {}

    def read_by_loss(self) -> Sequence[Forward]:
        """Return the models of `roles` that the loss itself reads."""
        return ()

    def before_step(self, model: Forward, batches: list[SupervisedBatch], total: Total) -> list[SupervisedBatch]:
        """Return this rank's annotated micro-batches with what the loss needs to know of the step as a whole. `total`
        sums over the ranks. No gradient."""
        return batches

    def extras(self) -> Mapping[str, Any]:
        """Return what the saved config.json says beside the architecture, as plain JSON values."""
        return {}

    def units(self, batch: SupervisedBatch) -> dict[str, torch.Tensor]:
        raise NotImplementedError

    def loss(self, model: Forward, batch: SupervisedBatch) -> StepLoss:
        raise NotImplementedError


def mark_counted(batch: TokenBatch) -> torch.Tensor:
    """Return which sequences weigh anything, [B] of 0 and 1: those with a masked token."""
    return mark_counted_sequences(batch.mask, batch.segments, len(batch))


def count_tokens(batch: TokenBatch) -> torch.Tensor:
    """Return how many tokens the sequences that weigh anything have, trained on or not."""
    return (mark_counted(batch) * batch.lengths).sum()
