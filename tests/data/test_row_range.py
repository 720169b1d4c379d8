"""Ranges of rows: shards cover all rows once, chunks have the numbers of their rows, and groups are not split."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from rlhf_suite.data.row import RowError
from rlhf_suite.data.row_range import RowSource
from rlhf_suite.data.sources import PROMPTS
from rlhf_suite.errors import UserError


@pytest.fixture
def source(tmp_path):
    """Two files of 5 and 3 rows; the third line is broken. Rows 0 and 1, 3 to 6, and 7 answer one prompt each."""
    first, second = tmp_path / "a.jsonl", tmp_path / "b.jsonl"
    lines = [json.dumps({"input": prompt, "n": n}) for n, prompt in enumerate("aaabbbbc")]
    lines[2] = "{"
    first.write_text("\n".join(lines[:5]))
    second.write_text("\n".join(lines[5:]))
    return RowSource(f"{first},{second}", "train", 0, None, PROMPTS)


def by_prompt(source):
    return replace(source, key=lambda row: row.values["input"])


@pytest.mark.parametrize("parts", [1, 2, 3, 7, 8, 11])
def test_the_parts_follow_each_other_and_differ_by_one_row_at_most(source, parts):
    ranges = [source.part(part, parts) for part in range(parts)]
    assert [number for each in ranges for number in each] == list(range(8))
    assert max(map(len, ranges)) - min(map(len, ranges)) <= 1


@pytest.mark.parametrize("parts", [1, 2, 3, 8])
def test_no_part_divides_a_group(source, parts):
    ranges = [by_prompt(source).part(part, parts) for part in range(parts)]
    assert [number for each in ranges for number in each] == list(range(8))
    assert {each.start for each in ranges} <= {0, 3, 7, 8}
    assert parts == 1 or len({each.start for each in ranges}) > 1


@pytest.mark.notices(
    "max_samples counts the rows that were skipped",
    "data/row_range.py",
    "min(total, start + self.limit)",
    "min(total, self.limit)",
)
def test_rows_are_left_out_at_the_start_and_at_the_end(source):
    source = replace(source, skip=3, limit=4)
    assert source.part(0, 1) == range(3, 7)
    assert [source.part(part, 2) for part in (0, 1)] == [range(3, 5), range(5, 7)]


def test_a_range_after_the_last_row_is_an_error(source):
    with pytest.raises(UserError, match=r"no rows are left of 8 \(data.skip_samples=8\)"):
        replace(source, skip=8).part(0, 1)


def test_chunks_have_the_numbers_of_their_rows(source):
    found = list(source.chunks(range(1, 7), 4))
    assert [numbers for numbers, _ in found] == [range(1, 5), range(5, 7)]
    assert [isinstance(row, RowError) for row in found[0][1]] == [False, True, False, False]
    assert [row.values["n"] for row in found[1][1]] == [5, 6]


@pytest.mark.parametrize(("size", "starts"), [(1, [0, 3, 7]), (2, [0, 3, 7]), (4, [0, 7]), (8, [0])])
def test_a_chunk_grows_until_its_last_group_is_whole(source, size, starts):
    assert [numbers.start for numbers, _ in by_prompt(source).chunks(range(8), size)] == starts
