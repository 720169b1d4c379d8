"""Several short examples in each row of data.max_len tokens.

A row is a group of sequences, so nothing else changes: positions begin anew in every example, attention never crosses
from one into another, and losses count the same units. Only what shares a row, and so a step, is decided here.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Sequence
from typing import overload

import numpy as np
from numpy.typing import NDArray

from rlhf_suite.data.batch import Group, Item, sequences


class PackedRows(Sequence[Group]):
    """Rows of `capacity` tokens at most, each with as many of `items` as fit; a row is put together when asked for."""

    def __init__(self, items: Sequence[Item], capacity: int) -> None:
        lengths = np.fromiter((len(item) for item in items), np.int64, len(items))
        self.items, self.capacity, self.tokens = items, capacity, int(lengths.sum())
        self.members, self.ends = best_fit_decreasing(lengths, capacity)

    def __len__(self) -> int:
        return len(self.ends)

    @overload
    def __getitem__(self, index: int) -> Group: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Group]: ...
    def __getitem__(self, index: int | slice) -> Group | Sequence[Group]:
        if isinstance(index, slice):
            return [self[each] for each in range(*index.indices(len(self)))]
        row = range(len(self))[index]
        chosen = self.members[self.ends[row - 1] if row else 0 : self.ends[row]]
        return Group(tuple(part for item in chosen for part in sequences(self.items[int(item)])))

    def summary(self) -> str:
        """How full the rows are, for a log."""
        full = self.tokens / (len(self) * self.capacity)
        return f"{len(self.items)} examples in {len(self)} rows of {self.capacity} tokens, {100 * full:.1f} % full"


def best_fit_decreasing(lengths: NDArray[np.int64], capacity: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """(members [N], ends [R]): row r holds the items `members[ends[r - 1] : ends[r]]`, ascending; rows are in the order
    of their first items.

    Longest first, each into the fullest row that has room: at most 11/9 of the fewest rows possible, plus one (Johnson,
    1973). N log(capacity), since rows with equal room are alike. Deterministic.
    """
    assert not len(lengths) or lengths.max() <= capacity, "an item is longer than a row"
    row_of = np.empty(len(lengths), np.int64)
    with_room: dict[int, list[int]] = {}  # room -> the rows that have it
    rooms: list[int] = []  # ascending, the keys of `with_room`
    num_rows = 0
    for item in np.argsort(-lengths, kind="stable").tolist():
        length = int(lengths[item])
        place = bisect_left(rooms, length)
        if place == len(rooms):
            room, row = capacity, num_rows
            num_rows += 1
        else:
            room = rooms[place]
            row = with_room[room].pop()
            if not with_room[room]:
                del with_room[rooms.pop(place)]
        row_of[item] = row
        if left := room - length:
            if left not in with_room:
                insort(rooms, left)
            with_room.setdefault(left, []).append(row)
    first = np.unique(row_of, return_index=True)[1]  # of every row's items
    rank = np.argsort(np.argsort(first))
    return np.argsort(rank[row_of], kind="stable"), np.cumsum(np.bincount(rank[row_of]))
