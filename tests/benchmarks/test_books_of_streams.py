"""What `benchmarks/stream_books.py` says of the files of a stream: groups that are lost, or counted twice."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))

import stream_books


class Books:
    """The files of a run that was killed after step 2, with a checkpoint of that step: of 13 groups, 8 are trained, 2
    rejected and 3 outstanding."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.trained = [[0, 1, 3, 4], [2, 6, 7, 9]]
        self.rejected = [5, 8]
        self.state = {"next": 13, "num_rejected": 2, "running": [[10, 1]], "ready": [[11, 2]], "waiting": [12]}

    def faults(self) -> list[str]:
        (self.folder / "rollouts").mkdir()
        for step, groups in enumerate(self.trained, start=1):
            rows = [
                {"prompt_index": stream_books.ORDER.prompt(index)[0], "sample": n} for index in groups for n in range(4)
            ]
            pq.write_table(pa.Table.from_pylist(rows), self.folder / f"rollouts/step_{step:06d}.parquet")
        lines = [json.dumps({"group": index, "reason": "scores [1, 1]"}) for index in self.rejected]
        (self.folder / "rollouts/rejected.jsonl").write_text("\n".join(lines) + "\n")
        (self.folder / "checkpoints/step_000002/samples").mkdir(parents=True)
        (self.folder / "checkpoints/step_000002/samples/slots.json").write_text(json.dumps(self.state))
        (self.folder / "checkpoints/step_000004.tmp").mkdir()
        return stream_books.faults(self.folder)


@pytest.fixture
def books(tmp_path):
    return Books(tmp_path)


def test_books_in_which_each_group_has_one_place_have_no_fault(books):
    assert books.faults() == []


def test_a_rejection_after_the_checkpoint_is_no_fault(books):
    books.rejected += [10]
    assert books.faults() == []


def test_a_group_that_nobody_knows_is_lost(books):
    books.rejected = [5]
    assert books.faults() == ["group 8 is lost"]


def test_a_group_that_is_trained_on_twice_is_a_fault(books):
    books.trained[1][0] = 0
    assert "group 0 was trained on 2 times" in books.faults()


def test_a_group_that_is_trained_on_and_outstanding_is_a_fault(books):
    books.state["running"][0] = [9, 1]
    assert "group 9 is in two places" in books.faults()


def test_at_the_end_nothing_is_outstanding_and_no_rejection_is_listed_twice(books):
    (books.folder / "status.json").write_text(json.dumps({"state": "done"}))
    books.trained = [[4 * step + n for n in range(4)] for step in range(stream_books.STEPS)]
    books.trained[-1][-1] = 41
    books.rejected = [39, 40, 40]
    assert books.faults() == ["group 40 was rejected 2 times"]
