"""A job over rows of a file: its counts and means, and where it goes on after a stop."""

from __future__ import annotations

import json

import pytest

from rlhf_suite.config.generate import OutputConfig
from rlhf_suite.errors import UserError
from rlhf_suite.train.batch_job import BatchJob, Done

# Rows 10 to 15 of the input, two samples of each that can be used; row 13 cannot.
CHUNKS = [
    Done(12, [{"n": 1}, {"n": 2}, {"n": 3}, {"n": 4}], {"prompts": 2.0, "skipped": 0.0, "samples": 4.0, "tokens": 40.0, "truncated": 1.0, "scored": 4.0, "score": 3.0}),
    Done(14, [{"n": 5}, {"n": 6}], {"prompts": 1.0, "skipped": 1.0, "samples": 2.0, "tokens": 10.0, "truncated": 2.0, "scored": 2.0, "score": 0.0}),
    Done(16, [{"n": 7}, {"n": 8}], {"prompts": 2.0, "skipped": 0.0, "samples": 2.0, "tokens": 10.0, "truncated": 0.0, "scored": 0.0, "score": 0.0}),
]  # fmt: skip


def job(tmp_path, resume: bool = False) -> BatchJob:
    return BatchJob("generate", OutputConfig(), tmp_path / "answers.jsonl", range(10, 16), resume)


def written(tmp_path) -> list[int]:
    return [json.loads(line)["n"] for line in (tmp_path / "answers.jsonl").read_text().splitlines()]


def test_counts_add_up_and_shares_are_of_samples(tmp_path):
    one = job(tmp_path)
    assert one.left == range(10, 16)
    one.write(CHUNKS, "tokens")
    metrics = one.finish()
    assert (metrics["prompts"], metrics["skipped"], metrics["samples"], metrics["tokens"]) == (5, 1, 8, 60)
    assert metrics["truncated_rate"] == pytest.approx(3 / 8)
    assert metrics["score"] == pytest.approx(3 / 6), "over those that have a score"
    assert written(tmp_path) == [1, 2, 3, 4, 5, 6, 7, 8]


def test_a_continued_job_takes_the_rows_that_are_left_and_counts_all(tmp_path):
    job(tmp_path).write(CHUNKS[:2], "tokens")
    again = job(tmp_path, resume=True)
    assert again.left == range(14, 16)
    again.write(CHUNKS[2:], "tokens")
    metrics = again.finish()
    assert (metrics["samples"], metrics["truncated_rate"]) == (8, 3 / 8)
    assert written(tmp_path) == [1, 2, 3, 4, 5, 6, 7, 8]
    assert list(job(tmp_path, resume=True).left) == [], "it is done"


def test_a_job_without_any_usable_row_is_an_error(tmp_path):
    one = job(tmp_path)
    one.write([Done(16, [], {"samples": 0.0, "skipped": 6.0, "tokens": 0.0})], "tokens")
    with pytest.raises(UserError, match="none of 6 rows can be used"):
        one.finish()
