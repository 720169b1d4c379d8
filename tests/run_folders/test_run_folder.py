"""The file status.json from the start to the end of a run."""

import json
import subprocess
import sys

import pytest

from full_disk import fill
from rlhf_suite.run_folders.run_folder import RunFolder


@pytest.fixture
def folder(tmp_path):
    return RunFolder(tmp_path / "run")


def test_a_new_folder_has_the_state_new(folder):
    assert folder.status() == {"state": "new", "fingerprint": None, "last_step": 0, "error": None, "metrics": {}}


def test_a_run_to_the_end(folder):
    folder.start("abc")
    assert folder.status()["state"] == "running"
    folder.record_step(1)
    folder.record_step(2)
    folder.mark_done({"eval/pass1": 0.75, "train/kl": float("nan")})
    status = json.loads((folder.path / "status.json").read_text())
    assert status["state"] == "done"
    assert status["fingerprint"] == "abc"
    assert status["last_step"] == 2
    assert status["metrics"] == {"eval/pass1": 0.75, "train/kl": None}


@pytest.mark.notices(
    "a run that goes on is still called failed",
    "run_folders/run_folder.py",
    "error=None, run=run, **process",
    "run=run, **process",
)
def test_a_failed_run_records_its_error_and_a_resumed_one_removes_it(folder):
    folder.start("abc")
    folder.record_step(7)
    folder.mark_failed(ValueError("no such file"))
    assert folder.status()["state"] == "failed"
    assert folder.status()["error"] == "ValueError: no such file"
    folder.start("abc")
    assert (folder.status()["state"], folder.status()["error"], folder.status()["last_step"]) == ("running", None, 7)


def test_a_reader_never_sees_half_a_file(folder):
    folder.start("abc")
    before = folder.status_file.stat().st_ino
    folder.record_step(1)
    assert folder.status_file.stat().st_ino != before  # replaced, not rewritten
    assert [path.name for path in folder.path.iterdir()] == ["status.json"]


def test_foreign_text_in_an_error_is_escaped_and_bounded(folder):
    folder.start("f")
    folder.mark_failed(RuntimeError("\x1b[2J\ud800\nnext line " + "x" * 3_000_000))
    error = json.loads(folder.status_file.read_text())["error"]
    assert error.startswith("RuntimeError: \\x1b[2J\\ud800\nnext line xxx")
    assert error.endswith("characters)") and len(error) < 21_000


def test_the_status_is_written_also_on_a_full_disk(small):
    folder = RunFolder(small / "run")
    folder.start("abc")
    fill(small)
    folder.record_step(3)
    folder.mark_failed(OSError("No space left on device"))
    status = folder.status()
    assert (status["state"], status["last_step"]) == ("failed", 3)
    assert "No space left" in status["error"]


def test_an_error_that_does_not_fit_is_cut(small):
    folder = RunFolder(small / "run")
    folder.start("abc")
    fill(small)
    folder.mark_failed("x" * 9000)
    assert folder.status()["state"] == "failed"
    assert folder.status()["error"].startswith("xxx")


def test_processes_that_write_the_status_at_once_do_not_disturb_each_other(folder):
    folder.start("abc")
    code = (
        "import sys; from pathlib import Path; from rlhf_suite.run_folders.run_folder import RunFolder\n"
        "for step in range(200): RunFolder(Path(sys.argv[1])).record_step(step)"
    )
    both = [subprocess.Popen([sys.executable, "-c", code, folder.path]) for _ in range(2)]
    assert [process.wait(120) for process in both] == [0, 0]
    assert folder.status()["last_step"] == 199
