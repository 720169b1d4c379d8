"""Two runs at the same time on one machine: neither takes a port, a file or a name of the other."""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory

import jobs
import pytest

pytestmark = pytest.mark.proof

WORDS = ["task=ppo", "demo=ppo", "train.max_steps=2", "ckpt.save_steps=1"]
LEFT = ("session_*", "rlhf-suite-weights-*", "plasma*", "psm_*")  # folders of Ray, and what was in shared memory


def left_behind(folder: Path) -> set[Path]:
    """The files of runs in the folder for temporary files and in shared memory."""
    return {path for place in (folder, Path("/dev/shm")) for pattern in LEFT for path in place.rglob(pattern)}


@pytest.fixture
def temporary(monkeypatch):
    """The folder for temporary files of the runs; its name leaves room for the sockets of Ray."""
    with TemporaryDirectory(prefix="t-") as folder:
        monkeypatch.setenv("TMPDIR", folder)
        yield Path(folder)


def test_two_runs_that_start_together_end_with_the_same_numbers(runs, temporary):
    folder = runs / "both"
    before = left_behind(temporary)
    both = [jobs.Job(folder / name, WORDS) for name in ("one", "other")]
    ends = [job.ended(2 * jobs.DEADLINE_S) for job in both]
    assert [end.code for end in ends] == [0, 0], [job.text() for job in both]
    one, other = (job.folder.path for job in both)
    rows = jobs.timeless(jobs.train_rows(one))
    assert len(rows) == 2 and rows == jobs.timeless(jobs.train_rows(other))
    assert jobs.timeless(jobs.eval_rows(one)) == jobs.timeless(jobs.eval_rows(other))
    assert jobs.digest(one) == jobs.digest(other)
    assert left_behind(temporary) == before
