"""Rules for runs that are continued."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict

from rlhf_suite.config.flags import FIXED
from rlhf_suite.config.names import unknown_flag
from rlhf_suite.config.problems import Problem
from rlhf_suite.config.resolve import flat, resume_of
from rlhf_suite.config.runs import ResumableRun, Run


def allowed_changes_are_flags(run: Run) -> Iterator[Problem]:
    key = "ckpt.allow_changes"
    for name in run.ckpt.allow_changes if isinstance(run, ResumableRun) else []:
        values = flat(asdict(run))
        if name not in values and not any(each.startswith(f"{name}.") for each in values):
            unknown = unknown_flag(name, run.task)
            yield Problem(key, f"{name}: {unknown.what}", unknown.fix)
        elif resume_of(name, run.task) == FIXED:
            what = f"{name} can never change: a checkpoint cannot be loaded with another value"
            yield Problem(key, what, f"remove {name} from the list, or start a new run in another folder")
