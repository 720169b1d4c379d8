"""A job over rows of a file: its counts and means, and where it goes on after a stop."""

from __future__ import annotations

import json

import pytest

from rlhf_suite.config.declarations.generate import OutputConfig
from rlhf_suite.errors import UserError
from rlhf_suite.offline.batch_job import BatchJob, Done


def done(stop: int, rows: list[int], prompts: int, truncated: int, scores: tuple[int, float]) -> Done:
    """A chunk of two rows of the input, each row of the output with ten tokens."""
    scored, score = scores
    counts = {"prompts": prompts, "skipped": 2 - prompts, "samples": len(rows), "tokens": 10 * len(rows)}
    sums = counts | {"truncated": truncated, "scored": scored, "score": score}
    return Done(stop, [{"n": number} for number in rows], {name: float(value) for name, value in sums.items()})


# Rows 10 to 15 of the input, of which one cannot be used.
CHUNKS = [
    done(12, [1, 2, 3, 4], prompts=2, truncated=1, scores=(4, 3.0)),
    done(14, [5, 6], prompts=1, truncated=2, scores=(2, 0.0)),
    done(16, [7, 8], prompts=2, truncated=0, scores=(0, 0.0)),
]


def job(tmp_path, resume: bool = False) -> BatchJob:
    return BatchJob("generate", OutputConfig(), tmp_path / "answers.jsonl", range(10, 16), resume)


def written(tmp_path) -> list[int]:
    return [json.loads(line)["n"] for line in (tmp_path / "answers.jsonl").read_text().splitlines()]


@pytest.mark.notices(
    "the share of responses cut off is per prompt",
    "offline/batch_job.py",
    'totals["truncated"] / totals["samples"]',
    'totals["truncated"] / totals["prompts"]',
)
def test_counts_add_up_and_shares_are_of_samples(tmp_path):
    one = job(tmp_path)
    assert one.left == range(10, 16)
    one.write(CHUNKS, "tokens")
    metrics = one.finish()
    assert (metrics["prompts"], metrics["skipped"], metrics["samples"], metrics["tokens"]) == (5, 1, 8, 80)
    assert metrics["truncated_rate"] == pytest.approx(3 / 8)
    assert metrics["score"] == pytest.approx(3 / 6), "over those that have a score"
    assert written(tmp_path) == [1, 2, 3, 4, 5, 6, 7, 8]


@pytest.mark.notices(
    "a continued job begins with its first row again",
    "offline/batch_job.py",
    "range(self.part.progress.next_row, self.rows.stop)",
    "range(self.rows.start, self.rows.stop)",
)
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
    with pytest.raises(UserError, match="none of the 6 rows can be used"):
        one.finish()
