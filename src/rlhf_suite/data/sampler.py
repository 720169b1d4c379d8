"""In which order rows are seen: a pure function of the seed and the step, so the data cursor is one integer."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True)
class BatchOrder:
    """Each epoch is a new shuffle of all rows, cut into batches; its last batch may be short, no row is dropped.

    To resume, ask for the next step: nothing else is remembered.
    """

    num_rows: int
    batch_size: int
    seed: int

    def __post_init__(self) -> None:
        assert self.num_rows >= 1 and self.batch_size >= 1 and self.seed >= 0

    @property
    def steps_per_epoch(self) -> int:
        """ceil(num_rows / batch_size)."""
        return -(-self.num_rows // self.batch_size)

    def epoch(self, step: int) -> int:
        """The epoch, from 0, that step (from 0) belongs to."""
        return step // self.steps_per_epoch

    def indices(self, step: int) -> list[int]:
        """The rows of step (from 0), over all ranks."""
        assert step >= 0, "steps count from 0"
        epoch, batch = divmod(step, self.steps_per_epoch)
        order = _shuffle(self.num_rows, self.seed, epoch)
        return order[batch * self.batch_size : (batch + 1) * self.batch_size].tolist()


@lru_cache(maxsize=4)
def _shuffle(num_rows: int, seed: int, epoch: int) -> NDArray[np.int64]:
    return np.random.Generator(np.random.PCG64([seed, epoch])).permutation(num_rows)
