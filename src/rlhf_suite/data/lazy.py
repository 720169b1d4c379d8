"""Sequences whose items are put together when they are asked for."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import TypeVar, overload

T_co = TypeVar("T_co", covariant=True)


class Lazy(Sequence[T_co]):
    """A sequence by its length and `at`, which never sees an index that is negative or too large."""

    @abstractmethod
    def at(self, place: int) -> T_co:
        """The item at a place from 0."""

    @overload
    def __getitem__(self, index: int) -> T_co: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[T_co]: ...
    def __getitem__(self, index: int | slice) -> T_co | Sequence[T_co]:
        places = range(len(self))[index]
        return self.at(places) if isinstance(places, int) else [self.at(place) for place in places]
