"""What a supervised task fills in: what it trains on; the trainer says how."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Literal, Protocol

import torch

from rlhf_suite.data.batch import Item, TokenBatch
from rlhf_suite.data.encode import Encoder
from rlhf_suite.losses.metrics import Mean, Metric
from rlhf_suite.losses.reduce import LossSum, counted_sequences

Forward = Callable[..., object]
Total = Callable[[torch.Tensor], torch.Tensor]  # the sum over the ranks


@dataclass(frozen=True)
class StepLoss:
    """The loss of one micro-batch: for each unit (`tokens`, `sequences`, ...) the SUM over the units in it, with
    gradient. The step's loss is the sum over units of total / count, with counts over all micro-batches and ranks."""

    sums: dict[str, torch.Tensor]
    metrics: Mapping[str, Metric]


class Objective(Protocol):
    """What an optimiser step minimises."""

    def units(self, batch: TokenBatch) -> dict[str, torch.Tensor]:
        """How many of each unit the batch holds; known before any forward."""
        ...

    def loss(self, model: Forward, batch: TokenBatch) -> StepLoss:
        """One forward; sums of losses, and metrics as (total, count)."""
        ...


@dataclass(frozen=True)
class FrozenRole:
    """A model that a task only reads. `path` null: the starting weights of the trained model."""

    path: str | None
    flag: str
    offload: bool = False  # its weights stay in host memory


class Task:
    """A supervised task: rows to items, and the objective over them. `encoder`, `units`, `loss` are enough for most."""

    encoder: Encoder[Item]  # tokens and mask of a row, or of each sequence of its group
    head: Literal["lm", "value"] = "lm"  # of the trained model
    main_metric: str = "loss"  # of the evaluation, by which the best checkpoint is chosen
    frozen: Mapping[str, Forward] = MappingProxyType({})  # the models of `roles`, there when `annotate` is called
    annotates_once: bool = False  # before training and on disk, instead of in every step

    def assemble(self, items: Sequence[Item]) -> Sequence[Item]:
        """All encoded rows of a source as the items to train on."""
        return items

    def roles(self) -> dict[str, FrozenRole]:
        """The frozen models beside the trained one."""
        return {}

    def annotate(self, batch: TokenBatch) -> dict[str, torch.Tensor]:
        """What the frozen models say of each sequence, each [B]: a function of the sequence alone. No gradient."""
        return {}

    def before_step(self, model: Forward, batches: list[TokenBatch], total: Total) -> list[TokenBatch]:
        """This rank's annotated micro-batches with what the loss needs of the step as a whole; `total` sums over the
        ranks. No gradient."""
        return batches

    def extras(self) -> Mapping[str, Any]:
        """What the saved config.json is to say beside the architecture, as plain JSON values."""
        return {}

    def units(self, batch: TokenBatch) -> dict[str, torch.Tensor]:
        raise NotImplementedError

    def loss(self, model: Forward, batch: TokenBatch) -> StepLoss:
        raise NotImplementedError


def counted(batch: TokenBatch) -> torch.Tensor:
    """Which sequences weigh anything, [B] of 0 and 1: those with a masked token."""
    return counted_sequences(batch.tokens["mask"], batch.segments, len(batch))


def counted_tokens(batch: TokenBatch) -> torch.Tensor:
    """How many tokens the sequences that weigh anything have, trained on or not."""
    return (counted(batch) * batch.lengths).sum()


def with_balance(unit: str, loss: LossSum, aux_loss: torch.Tensor | None, coef: float, batch: TokenBatch) -> StepLoss:
    """A loss over `unit` plus `coef` x the MoE load-balancing loss, a mean over all tokens, where the model has one."""
    return balanced(StepLoss({unit: loss.total}, loss.metrics), aux_loss, coef, batch)


def balanced(loss: StepLoss, aux_loss: torch.Tensor | None, coef: float, batch: TokenBatch) -> StepLoss:
    """The same for a loss over several units."""
    if aux_loss is None:
        return loss
    balance, tokens = aux_loss * counted_tokens(batch), counted_tokens(batch)
    metrics = {**loss.metrics, "aux_loss": Mean(balance.detach(), tokens)}
    return StepLoss({**loss.sums, "all_tokens": coef * balance}, metrics)
