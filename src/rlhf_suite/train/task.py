"""The protocol a supervised task fills in: what it trains on; the trainer says how."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch

from rlhf_suite.data.batch import Example, TokenBatch
from rlhf_suite.data.rows import Row
from rlhf_suite.losses.reduce import Mean

Forward = Callable[..., object]


@dataclass(frozen=True)
class StepLoss:
    """The loss of one micro-batch: for each unit (`tokens`, `sequences`, ...) the SUM over the units in it, with
    gradient. The step's loss is the sum over units of total / count, with counts over all micro-batches and ranks."""

    sums: dict[str, torch.Tensor]
    metrics: dict[str, Mean]


class Objective(Protocol):
    """What an optimiser step minimises."""

    def units(self, batch: TokenBatch) -> dict[str, torch.Tensor]:
        """How many of each unit the batch holds; known before any forward."""
        ...

    def loss(self, model: Forward, batch: TokenBatch) -> StepLoss:
        """One forward; sums of losses, and metrics as (total, count)."""
        ...


class Task(Objective, Protocol):
    """A supervised task: rows to examples, and the objective over them."""

    main_metric: str  # of the evaluation, by which the best checkpoint is chosen

    def encode(self, row: Row) -> Example:
        """Tokens and mask of a row; RowError says why a row cannot be used."""
        ...
