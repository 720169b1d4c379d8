"""Ranges of rows: shards that cover all rows once, chunks that know their numbers."""

from __future__ import annotations

import json

import pytest

from rlhf_suite.config.data import RowRangeConfig
from rlhf_suite.data.row import RowError
from rlhf_suite.data.row_range import chunks, row_range
from rlhf_suite.errors import UserError


@pytest.fixture
def config(tmp_path):
    """Two sources of 5 and 3 rows; the third line is broken."""
    first, second = tmp_path / "a.jsonl", tmp_path / "b.jsonl"
    lines = [json.dumps({"input": str(n)}) for n in range(8)]
    lines[2] = "{"
    first.write_text("\n".join(lines[:5]))
    second.write_text("\n".join(lines[5:]))
    return RowRangeConfig(prompt_dataset=f"{first},{second}")


@pytest.mark.parametrize("parts", [1, 2, 3, 7, 8, 11])
def test_the_parts_follow_each_other_and_differ_by_one_row_at_most(config, parts):
    ranges = [row_range(config, (part, parts)) for part in range(parts)]
    assert [number for each in ranges for number in each] == list(range(8))
    assert max(map(len, ranges)) - min(map(len, ranges)) <= 1


def test_rows_are_left_out_at_the_start_and_at_the_end(config):
    config.skip_samples, config.max_samples = 3, 4
    assert row_range(config, (0, 1)) == range(3, 7)
    assert [row_range(config, (part, 2)) for part in (0, 1)] == [range(3, 5), range(5, 7)]


def test_a_range_behind_the_last_row_is_told(config):
    config.skip_samples = 8
    with pytest.raises(UserError, match=r"no rows are left of 8 \(data.skip_samples=8\)"):
        row_range(config, (0, 1))


def test_chunks_know_the_numbers_of_their_rows(config):
    found = list(chunks(config, range(1, 7), 4))
    assert [numbers for numbers, _ in found] == [range(1, 5), range(5, 7)]
    assert [isinstance(row, RowError) for row in found[0][1]] == [False, True, False, False]
    assert [row.values["input"] for row in found[1][1]] == ["5", "6"]
