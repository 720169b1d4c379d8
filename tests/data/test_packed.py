"""Rows of several examples: every example once, none over the capacity, nearly full, always the same."""

from __future__ import annotations

import random

import numpy as np
import pytest

from rlhf_suite.data.batch import Example
from rlhf_suite.data.packing import PackedRows, best_fit_decreasing


def rows_of(lengths, capacity):
    members, ends = best_fit_decreasing(np.array(lengths), capacity)
    return [part.tolist() for part in np.split(members, ends[:-1])]


@pytest.mark.notices(
    "a packed row has one token more than it may",
    "data/packing.py",
    "bisect_left(spaces, length)",
    "bisect_left(spaces, length - 1)",
)
def test_each_item_goes_into_the_fullest_row_with_space_for_it():
    # 7 and 6 open rows of 10; 4 fills the second; 3 the first; 2 and 2 open a third.
    assert rows_of([2, 6, 3, 7, 4, 2], 10) == [[0, 5], [1, 4], [2, 3]]
    assert rows_of([10, 10], 10) == [[0], [1]]
    assert rows_of([5], 10) == [[0]]


def by_the_book(lengths, capacity):
    """Best fit decreasing as it is defined, N x R."""
    rows, room = [], []
    for item in sorted(range(len(lengths)), key=lambda item: (-lengths[item], item)):
        fits = [row for row in range(len(rows)) if room[row] >= lengths[item]]
        if fits:
            row = min(fits, key=lambda row: room[row])
        else:
            row = len(rows)
            rows.append([])
            room.append(capacity)
        rows[row].append(item)
        room[row] -= lengths[item]
    return rows


@pytest.mark.parametrize("seed", range(20))
def test_every_item_is_in_one_row_and_there_are_as_few_rows_as_defined(seed):
    rng = random.Random(seed)
    lengths = [rng.randint(1, rng.choice([5, 60])) for _ in range(rng.randint(1, 300))]
    rows = rows_of(lengths, 60)
    assert sorted(item for row in rows for item in row) == list(range(len(lengths)))
    assert max(sum(lengths[item] for item in row) for row in rows) <= 60
    assert len(rows) == len(by_the_book(lengths, 60))
    assert rows == sorted(rows, key=lambda row: row[0]) and all(row == sorted(row) for row in rows)


def test_a_row_is_its_examples_in_order():
    examples = [Example(list(range(n)), [0] * n, f"f:{n}") for n in (2, 6, 3, 7, 4, 2)]
    rows = PackedRows(examples, 10)
    assert [row.examples for row in rows] == [tuple(examples[i] for i in chosen) for chosen in ((0, 5), (1, 4), (2, 3))]
    assert rows[-1] == rows[2] and rows[:2] == [rows[0], rows[1]]
    assert rows[1].where == "f:6, f:4" and rows[0].where == "f:2"
    assert rows.summary() == "6 examples in 3 rows of 10 tokens, 80.0 % full"
