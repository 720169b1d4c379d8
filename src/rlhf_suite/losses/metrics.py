"""What a loss says beside its total, kept so that it adds up exactly over micro-batches and ranks."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol, Self

import torch
from torch import Tensor


class Metric(Protocol):
    """Parts of one number, of which each micro-batch has some."""

    def __add__(self, other: Self, /) -> Self: ...

    def exact(self) -> Self:
        """Return it in float64, without gradient: what is added up. It stays on its device, so nothing waits."""
        ...


def exact(values: Tensor) -> Tensor:
    """Return values in float64, without gradient."""
    return values.detach().double()


def exact_beside(count: Tensor | float, other: Tensor) -> Tensor:
    """Return a count in float64 on the device of `other`; nothing waits for its copy."""
    return exact(torch.as_tensor(count)).to(other.device, non_blocking=True)


@dataclass(frozen=True)
class Mean:
    """`total / count`, both kept."""

    total: Tensor  # scalar
    count: Tensor | float

    def __add__(self, other: Mean) -> Mean:
        return Mean(self.total + other.total, self.count + other.count)

    def exact(self) -> Mean:
        return Mean(exact(self.total), exact_beside(self.count, self.total))

    def sums(self) -> Tensor:
        """Return what is added up over ranks, [2] float64."""
        return torch.stack([exact(self.total), exact_beside(self.count, self.total)])

    @staticmethod
    def of_sums(total: float, count: float) -> float | None:
        """Return the mean; None without a case."""
        return total / count if count > 0 else None


@dataclass(frozen=True)
class Deviation:
    """The standard deviation of values: their sum, the sum of their squares and their number are kept."""

    total: Tensor  # scalar
    squares: Tensor  # scalar
    count: Tensor | float

    def __add__(self, other: Deviation) -> Deviation:
        return Deviation(self.total + other.total, self.squares + other.squares, self.count + other.count)

    def exact(self) -> Deviation:
        return Deviation(exact(self.total), exact(self.squares), exact_beside(self.count, self.total))

    def sums(self) -> Tensor:
        """Return what is added up over ranks, [3] float64."""
        return torch.stack([exact(self.total), exact(self.squares), exact_beside(self.count, self.total)])

    @staticmethod
    def of_sums(total: float, squares: float, count: float) -> float | None:
        """Return the deviation; None without a case."""
        return math.sqrt(max(squares / count - (total / count) ** 2, 0.0)) if count > 0 else None


@dataclass(frozen=True)
class Quantile:
    """The value below which a share of the counted values lies. It is not a mean over cases, so all of them are kept,
    those that do not count too: to leave them out, the host would have to wait for the device."""

    values: Tensor  # [N]
    counted: Tensor  # [N], above 0 where a value counts
    share: float

    def __add__(self, other: Quantile) -> Quantile:
        return Quantile(torch.cat([self.values, other.values]), torch.cat([self.counted, other.counted]), self.share)

    def exact(self) -> Quantile:
        return Quantile(exact(self.values), exact(self.counted), self.share)

    def columns(self) -> Tensor:
        """Return what is gathered from all ranks, [2, N] float64."""
        return torch.stack([exact(self.values), exact(self.counted)])

    def of_columns(self, columns: Tensor) -> float | None:
        """Return the quantile of all ranks' values; None without one."""
        values = columns[0, columns[1] > 0]
        return float(values.quantile(self.share)) if len(values) else None


@dataclass(frozen=True)
class Ranking:
    """How well scores tell two classes apart. It is not a mean over cases, so all of them are kept, as those of a
    quantile are."""

    scores: Tensor  # [N]
    positive: Tensor  # [N] bool: the class that is to score higher
    counted: Tensor  # [N], above 0 where a score counts

    def __add__(self, other: Ranking) -> Ranking:
        return Ranking(
            torch.cat([self.scores, other.scores]),
            torch.cat([self.positive, other.positive]),
            torch.cat([self.counted, other.counted]),
        )

    def exact(self) -> Ranking:
        return Ranking(exact(self.scores), self.positive, exact(self.counted))

    def columns(self) -> Tensor:
        """Return what is gathered from all ranks, [3, N] float64."""
        return torch.stack([exact(self.scores), exact(self.positive), exact(self.counted)])

    @staticmethod
    def of_columns(columns: Tensor) -> float | None:
        """Return P(a positive case scores higher than one of the other class), ties half: the area under the ROC curve,
        0.5 by guessing, whatever share is positive. (sum of the positives' ranks - P (P + 1) / 2) / (P N) (Mann and
        Whitney, 1947). NaN if a score is; None without both classes.
        """
        scores, classes = columns[:2, columns[2] > 0]
        positive = classes > 0
        positives = int(positive.sum())
        others = len(positive) - positives
        if positives == 0 or others == 0:
            return None
        if scores.isnan().any():
            return math.nan
        _, place, counts = scores.unique(return_inverse=True, return_counts=True)
        ranks = (counts.cumsum(0) - (counts - 1) / 2)[place]  # from 1; equal scores share the mean of theirs
        return float((ranks[positive].sum() - positives * (positives + 1) / 2) / (positives * others))
