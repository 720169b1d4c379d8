"""Files of samples are written beside the run: in order, only so many behind, and never left out."""

from __future__ import annotations

import threading
from functools import partial

import pyarrow.parquet as pq
import pytest
from plain_run import run, small

from rlhf_suite.background import in_background
from rlhf_suite.errors import UserError
from rlhf_suite.rl.rollout_file import MOST, SampleFiles, forget_after


def test_files_are_written_in_the_order_in_which_they_were_asked_for():
    files, written = SampleFiles(), list[int]()
    for number in range(9):
        files.write(partial(written.append, number))
    files.finish()
    files.close()
    assert written == [*range(9)]


def test_a_run_is_never_more_than_a_few_files_ahead():
    files, may_go_on, written = SampleFiles(), threading.Event(), list[int]()

    def slow(number: int) -> None:
        may_go_on.wait(60)
        written.append(number)

    asked = [in_background("driver", partial(files.write, partial(slow, number))) for number in range(MOST - 1)]
    for each in asked:
        each.result(60)  # these are not waited for
    next_one = in_background("driver", partial(files.write, partial(slow, MOST - 1)))
    assert written == [] and not next_one.done()
    may_go_on.set()
    next_one.result(60)
    assert len(written) >= 1
    files.finish()
    files.close()
    assert sorted(written) == [*range(MOST)]


def test_what_fails_is_raised_in_who_asks_for_the_next_file_or_waits_for_all():
    def fail() -> None:
        raise UserError("the disk is full")

    for ask in (SampleFiles.finish, lambda files: [files.write(lambda: None) for _ in range(MOST)]):
        files = SampleFiles()
        with pytest.raises(UserError, match="the disk is full"):
            files.write(fail)
            ask(files)
        files.close()


COPIES = ("step_best.parquet", "step_000009_of_june.parquet", "step_000009 (copy).parquet", "step_000009.parquet.old")


@pytest.mark.notices(
    "a run that continues removes copies that the user has made of files of samples",
    "run_folders/run_folder.py",
    "SAMPLES_NAME.fullmatch(path.name)",
    "re.match(r'step_([0-9]+)', path.name)",
)
@pytest.mark.notices(
    "answers to a benchmark of steps that are run again stay",
    "rl/rollout_file.py",
    "for place in folder.glob(",
    "for place in folder.glob('none of ' ",
)
def test_a_run_that_continues_removes_its_files_of_later_steps_and_no_others(tmp_path):
    for place in (tmp_path, tmp_path / "gsm8k"):
        place.mkdir(exist_ok=True)
        for name in ("step_000003.parquet", "step_000009.parquet", "step_1000000.parquet", *COPIES):
            (place / name).touch()
    forget_after(tmp_path, 3)
    for place in (tmp_path, tmp_path / "gsm8k"):
        assert {path.name for path in place.glob("*.*")} == {"step_000003.parquet", *COPIES}


@pytest.mark.stack
def test_a_run_ends_with_all_of_its_files(ranks, tmp_path):
    ranks(1).call(run, tmp_path, small(eval__dataset="builtin:reverse", eval__max_samples=2))
    rows = [len(pq.read_table(file)) for file in sorted((tmp_path / "rollouts").glob("*.parquet"))]
    assert rows == [4, 4] and len([*(tmp_path / "evaluations").glob("*.parquet")]) == 2


def ended_with(world, folder, config) -> str:
    with pytest.raises(Exception) as raised:
        run(world, folder, config)
    return f"{type(raised.value).__name__}: {raised.value}"


@pytest.mark.stack
def test_a_file_that_cannot_be_written_ends_the_run_with_that_error(ranks, tmp_path):
    (tmp_path / "rollouts").write_text("not a folder")
    (said,) = ranks(1).call(ended_with, tmp_path, small())
    assert "rollouts" in said and ("FileExists" in said or "NotADirectory" in said or "Disk" in said), said
