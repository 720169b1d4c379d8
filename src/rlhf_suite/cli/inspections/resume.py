"""Whether a run may go on from what an earlier one left: the same flags, and records that can be read."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from rlhf_suite.config.problems import Problem
from rlhf_suite.config.resume import changes, load_earlier, refusal
from rlhf_suite.config.runs import LoopRun, ResumableRun, Run, TrainedRun
from rlhf_suite.tracking.run_folder import RunFolder
from rlhf_suite.train.checkpoint import store_of


def resume_fits(run: Run, folder: Path | None) -> Iterator[Problem]:
    """A continued run has the flags of the earlier one, except for those that ckpt.allow_changes names."""
    if folder is None or not isinstance(run, ResumableRun) or not run.ckpt.load_enable:
        return
    record = RunFolder(folder)
    source = earlier_config(run, record)
    if source is None:
        return
    before = load_earlier(source)
    if isinstance(before, Problem):
        yield before
        return
    problem = refusal(changes(before, run), run.ckpt.allow_changes, source)
    if problem is not None:
        yield problem


def earlier_config(run: Run, record: RunFolder) -> Path | None:
    """Return the configuration of the run that would be continued; None where it has not done anything yet."""
    if isinstance(run, TrainedRun):
        newest = store_of(run.ckpt, record).latest()
        if newest is not None and newest.config.exists():
            return newest.config
        is_done = record.status()["state"] == "done"
        return record.config if is_done and record.config.exists() else None
    begun = record.loop if isinstance(run, LoopRun) else record.path / "progress.json"
    return record.config if begun.exists() and record.config.exists() else None
