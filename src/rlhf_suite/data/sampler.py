"""The order in which rows are trained on: a pure function of the seed and the step, so one integer is
enough to resume."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True)
class BatchOrder:
    """Shuffled batches: each epoch is a new shuffle of all rows. The last batch of an epoch may be short; no row is
    dropped."""

    num_rows: int
    batch_size: int
    seed: int

    def __post_init__(self) -> None:
        assert self.num_rows >= 1 and self.batch_size >= 1 and self.seed >= 0

    @property
    def steps_per_epoch(self) -> int:
        """Return ceil(num_rows / batch_size)."""
        return -(-self.num_rows // self.batch_size)

    def epoch(self, step: int) -> int:
        """Return the epoch (from 0) of a step (from 0)."""
        return step // self.steps_per_epoch

    def number(self, place: int) -> int:
        """Return the batch that has the row at a place of the whole order (from 0)."""
        epoch, row = divmod(place, self.num_rows)
        return epoch * self.steps_per_epoch + row // self.batch_size

    def row(self, place: int) -> int:
        """Return the number of the row at a place of the whole order."""
        epoch, row = divmod(place, self.num_rows)
        return int(_shuffle(self.num_rows, self.seed, epoch)[row])

    def rows_before(self, number: int) -> int:
        """Return how many rows the batches before a batch have."""
        epoch, batch = divmod(number, self.steps_per_epoch)
        return epoch * self.num_rows + min(batch * self.batch_size, self.num_rows)

    def indices(self, step: int) -> list[int]:
        """Return the row numbers of a step (from 0), for all ranks together."""
        assert step >= 0, "steps count from 0"
        epoch, batch = divmod(step, self.steps_per_epoch)
        order = _shuffle(self.num_rows, self.seed, epoch)
        return order[batch * self.batch_size : (batch + 1) * self.batch_size].tolist()


@lru_cache(maxsize=4)
def _shuffle(num_rows: int, seed: int, epoch: int) -> NDArray[np.int64]:
    """Return the row order of an epoch, [num_rows]."""
    return np.random.Generator(np.random.PCG64([seed, epoch])).permutation(num_rows)
