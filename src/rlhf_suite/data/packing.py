"""Which sequences go together: into a micro-batch or to a rank (by count or token budget), and into a packed row.

A packed row is a group of sequences, so nothing else changes: positions start again in every example, attention does
not cross from one example to the next, and losses count the same units. Packing decides only which examples share a
row.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left, insort
from collections.abc import Sequence
from operator import itemgetter

import numpy as np
from numpy.typing import NDArray

from rlhf_suite.data.batch import Group, Item, sequences
from rlhf_suite.data.combine import Combined, LazySequence

# Weight of a bin and the indices of its sequences. The weight orders bins by the sum of lengths, then by the number of
# sequences: it is the sum of (length x (N + 1) + 1) over them.
_Bin = tuple[int, list[int]]
_Partition = list[_Bin]  # without its empty bins, the heaviest first


def balance(lengths: Sequence[int], parts: int) -> list[list[int]]:
    """Split the sequences into `parts` bins of nearly equal token sums.

    Largest differencing method (Karmarkar & Karp, 1982): each sequence begins as a partition of its own with `parts`
    bins, all but one empty. The two partitions with the largest spread (largest bin - smallest bin) are merged, the
    largest bin of one with the smallest of the other, until one partition is left. A merge of partitions with a and b
    non-empty bins has min(a + b, parts) non-empty ones, so a bin is empty only if there are fewer sequences than bins.

    Deterministic. The indices in a bin ascend, and the bins are in order of their first index, empty ones last.
    """
    assert parts >= 1, "at least one part"
    if not lengths:
        return [[] for _ in range(parts)]
    unit = len(lengths) + 1
    heap: list[tuple[int, int, _Partition]] = []  # (-spread, age, partition)
    for index, length in enumerate(lengths):
        heap.append((-int(length) if parts > 1 else 0, index, [(int(length) * unit + 1, [index])]))
    heapq.heapify(heap)
    for age in range(len(lengths), 2 * len(lengths) - 1):
        _, _, one = heapq.heappop(heap)
        _, _, other = heapq.heappop(heap)
        merged = _merge(one, other, parts)
        smallest = merged[-1][0] // unit if len(merged) == parts else 0
        heapq.heappush(heap, (smallest - merged[0][0] // unit, age, merged))
    bins = [members for _, members in heap[0][2]]
    return _in_order(bins + [[] for _ in range(parts - len(bins))])


def _merge(one: _Partition, other: _Partition, parts: int) -> _Partition:
    """Return the partition whose bins are the largest of `one` with the smallest of `other`, and so on. Neither can be
    used any more: a partition of one sequence is inserted in its place, without a copy of the others."""
    if len(other) == 1:
        bin_ = _join(one.pop(), other[0]) if len(one) == parts else other[0]
        insort(one, bin_, key=lambda other_bin: -other_bin[0])
        return one
    alone = parts - len(other)  # so many bins of `one` meet an empty one
    met = len(one) - alone
    both = [_join(a, b) for a, b in zip(one[alone:], reversed(other[-met:]), strict=True)] if met > 0 else []
    merged = one[:alone] + both + (other[-met - 1 :: -1] if met > 0 else other[::-1])
    return sorted(merged, key=itemgetter(0), reverse=True)


def _join(a: _Bin, b: _Bin) -> _Bin:
    """Return the bin with the sequences of both; the longer list takes up the shorter one."""
    few, many = sorted((a[1], b[1]), key=len)
    many.extend(few)
    return a[0] + b[0], many


def micro_batches(
    lengths: Sequence[int],
    *,
    count: int | None = None,
    token_budget: int | None = None,
    padded: bool = False,
    order: Sequence[int] | None = None,
) -> list[list[int]]:
    """Split the sequences into micro-batches; exactly one of the two rules is given.

    count:        at most `count` sequences each, in the given order.
    token_budget: at most `token_budget` tokens each, in few bins of nearly equal sums: the smallest number for which
                  largest differencing or first-fit decreasing finds a split. A longer sequence raises the budget to
                  its own length. If the sequences are `padded` to the longest of their micro-batch, padding counts.
                  With an `order` of all sequences, bins are filled in it instead, one after the other.
    """
    assert (count is None) != (token_budget is None), "either count or token_budget"
    if count is not None:
        assert count >= 1, "at least one sequence per micro-batch"
        return [list(range(start, min(start + count, len(lengths)))) for start in range(0, len(lengths), count)]
    assert token_budget is not None
    if not lengths:
        return []
    token_budget = max(token_budget, *lengths)
    if padded:
        return _alike(lengths, token_budget)
    if order is not None:
        return _fill(lengths, token_budget, order)
    fallback = _first_fit_decreasing(lengths, token_budget)
    for parts in range(max(1, -(-sum(lengths) // token_budget)), len(fallback) + 1):
        bins = balance(lengths, parts)
        if all(sum(lengths[index] for index in part) <= token_budget for part in bins):
            return bins
    return fallback


def _alike(lengths: Sequence[int], budget: int) -> list[list[int]]:
    """Return bins of sequences of like lengths: longest first, and as many as fit when all get the longest's length."""
    order = np.argsort(-np.asarray(lengths), kind="stable").tolist()
    bins: list[list[int]] = []
    start = 0
    while start < len(order):
        end = start + budget // max(1, lengths[order[start]])
        bins.append(order[start:end])
        start = end
    return _in_order(bins)


def _fill(lengths: Sequence[int], budget: int, order: Sequence[int]) -> list[list[int]]:
    """Return bins filled in an order, each until the next sequence does not fit."""
    bins: list[list[int]] = [[]]
    space = budget
    for index in order:
        if lengths[index] > space:
            bins.append([])
            space = budget
        bins[-1].append(index)
        space -= lengths[index]
    return _in_order(bins)


def _first_fit_decreasing(lengths: Sequence[int], budget: int) -> list[list[int]]:
    """Return bins filled longest sequence first, each into the first bin with space for it.

    There are at most 11/9 of the fewest possible bins, plus one.
    """
    bins: list[list[int]] = []
    space = np.full(len(lengths), budget)  # of every bin; the first one after `bins` is empty and has space
    for index in np.argsort(-np.asarray(lengths), kind="stable").tolist():
        place = int((space[: len(bins) + 1] >= lengths[index]).argmax())
        if place == len(bins):
            bins.append([])
        bins[place].append(index)
        space[place] -= lengths[index]
    return _in_order(bins)


def _in_order(bins: list[list[int]]) -> list[list[int]]:
    """Return the bins with ascending indices, in order of their first index, empty bins last."""
    ascending = [sorted(part) for part in bins]
    return sorted(ascending, key=lambda part: (not part, part[:1]))


class PackedRows(LazySequence[Group]):
    """Rows of at most `capacity` tokens, each with as many of `items` as fit. A row is built when it is read."""

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
        """Return how full the rows are, for the log."""
        full = self.tokens / (len(self) * self.capacity)
        return f"{len(self.items)} examples in {len(self)} rows of {self.capacity} tokens, {100 * full:.1f} % full"


def token_counts(items: Sequence[Item]) -> NDArray[np.int64]:
    """Return the tokens of each item, [N]. Items of a store are not read, since it knows their counts."""
    from rlhf_suite.data.store import Store  # pyarrow: items in memory are packed without it

    if isinstance(items, Combined):
        counts = np.concatenate([token_counts(part) for part in items.parts])
        return counts if items.order is None else counts[items.order]
    if isinstance(items, Store):
        return items.layout.counts.astype(np.int64)
    return np.fromiter((len(item) for item in items), np.int64, len(items))


def best_fit_decreasing(lengths: NDArray[np.int64], capacity: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return (members [N], ends [R]): row r holds the items `members[ends[r - 1] : ends[r]]`, in ascending order.

    Rows are in the order of their first items. The longest item comes first, each goes into the fullest row with space
    for it: at most 11/9 of the fewest possible rows, plus one (Johnson, 1973). It takes N log(capacity) steps, since
    rows with equal space are interchangeable. Deterministic.
    """
    assert not len(lengths) or lengths.max() <= capacity, "an item is longer than a row"
    row_of = np.empty(len(lengths), np.int64)
    rows_with: dict[int, list[int]] = {}  # free tokens -> the rows that have so many
    spaces: list[int] = []  # ascending, the keys of `rows_with`
    num_rows = 0
    for item in np.argsort(-lengths, kind="stable").tolist():
        length = int(lengths[item])
        place = bisect_left(spaces, length)
        if place == len(spaces):
            space, row = capacity, num_rows
            num_rows += 1
        else:
            space = spaces[place]
            row = rows_with[space].pop()
            if not rows_with[space]:
                del rows_with[spaces.pop(place)]
        row_of[item] = row
        if left := space - length:
            if left not in rows_with:
                insort(spaces, left)
            rows_with.setdefault(left, []).append(row)
    first = np.unique(row_of, return_index=True)[1]  # the first item of each row
    rank = np.argsort(np.argsort(first))
    return np.argsort(rank[row_of], kind="stable"), np.cumsum(np.bincount(rank[row_of]))
