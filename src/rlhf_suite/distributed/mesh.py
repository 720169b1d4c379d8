"""The axes along which the ranks of a model divide its work, and the place of one rank among them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

T = TypeVar("T")


@dataclass(frozen=True)
class Mesh:
    """How many ranks a model has along each axis.

    The sequences of a batch are split over `data`, and counts are summed over it. The tokens of each batch are split
    over `sequence`: its ranks get the same batches. The matrices of a layer are split over `tensor`: its ranks get the
    same batches too, and their numbers are successive.
    """

    data: int
    sequence: int = 1
    tensor: int = 1

    @property
    def size(self) -> int:
        """Return the number of ranks."""
        return self.data * self.sequence * self.tensor

    @property
    def replicas(self) -> int:
        """Return the number of ranks that hold the same part of the matrices."""
        return self.data * self.sequence

    def data_index(self, rank: int) -> int:
        """Return which part of a batch a rank works on: ranks that share a part have successive numbers."""
        return rank // (self.sequence * self.tensor)

    def tensor_index(self, rank: int) -> int:
        """Return which part of the split matrices a rank holds."""
        return rank % self.tensor

    def replica_index(self, rank: int) -> int:
        """Return the number of a rank among those that hold the same part of the matrices: ZeRO divides over them."""
        return rank // self.tensor

    def sequence_index(self, rank: int) -> int:
        """Return which part of the tokens of its batches a rank holds."""
        return self.replica_index(rank) % self.sequence

    def one_per_part(self, answers: Sequence[T]) -> list[T]:
        """Return the answers of one rank for each part of a batch, from those of all ranks: the others are equal."""
        assert len(answers) == self.size, (len(answers), self)
        return list(answers[:: self.sequence * self.tensor])


@dataclass(frozen=True)
class Rank:
    """One process among those of a model: its number, where all of them meet, and the kind of its device."""

    number: int
    mesh: Mesh
    host: str  # of the rendezvous store
    port: int
    device: str  # "cpu" or "cuda"
