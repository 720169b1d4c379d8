"""Several short examples in each row of data.max_len tokens.

A row is a group of sequences, so nothing else changes: positions begin anew in every example, attention never crosses
from one into another, and losses count the same units. Only what shares a row, and so a step, is decided here.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from rlhf_suite.data.batch import Group, Item, sequences
from rlhf_suite.data.lazy import Lazy
from rlhf_suite.data.rows import Combined
from rlhf_suite.data.store import Store


class PackedRows(Lazy[Group]):
    """Rows of `capacity` tokens at most, each with as many of `items` as fit; a row is put together when asked for."""

    def __init__(self, items: Sequence[Item], capacity: int) -> None:
        lengths = token_counts(items)
        self.items, self.capacity, self.tokens = items, capacity, int(lengths.sum())
        self.members, self.ends = best_fit_decreasing(lengths, capacity)

    def __len__(self) -> int:
        return len(self.ends)

    def at(self, place: int) -> Group:
        chosen = self.members[self.ends[place - 1] if place else 0 : self.ends[place]]
        return Group(tuple(part for item in chosen for part in sequences(self.items[int(item)])))

    def summary(self) -> str:
        """How full the rows are, for a log."""
        full = self.tokens / (len(self) * self.capacity)
        return f"{len(self.items)} examples in {len(self)} rows of {self.capacity} tokens, {100 * full:.1f} % full"


def token_counts(items: Sequence[Item]) -> NDArray[np.int64]:
    """Tokens of each item [N]; known without reading the items where they are stored with their counts."""
    if isinstance(items, Combined):
        counts = np.concatenate([token_counts(part) for part in items.parts])
        return counts if items.order is None else counts[items.order]
    if isinstance(items, Store):
        return items.layout.counts.astype(np.int64)
    return np.fromiter((len(item) for item in items), np.int64, len(items))


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
