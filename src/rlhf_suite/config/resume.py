"""What a continued run may not change: the differences between the run that was and the run that is to go on."""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from rlhf_suite.config.flags import FIXED, FREE, all_values, flat
from rlhf_suite.config.formatting import shown
from rlhf_suite.config.problems import Problem
from rlhf_suite.config.record import load, recorded_values, resume_of
from rlhf_suite.config.runs import LoopRun, ResumableRun, Run, TrainedRun

# These flags decide how many steps a run has, and so the learning rate of each of them.
LENGTHS = ("train.max_steps", "train.max_epochs", "train.num_episodes")
# Where a checkpoint was found does not change what is in it.
PLACE = "ckpt.path"
# Checkpoints hold parts of parameters by name, so these may differ with ds.use_universal_ckpt.
SHAPE = re.compile(r"ds\.zero_stage|[\w.]+\.num_(nodes|gpus_per_node)")


@dataclass(frozen=True)
class Change:
    """A flag that is not what it was."""

    key: str
    before: Any
    now: Any
    is_fixed: bool  # no checkpoint can be loaded with another value

    def __str__(self) -> str:
        return f"{self.key}: {shown(self.before)} -> {shown(self.now)}"


def changes(before: Run, now: Run) -> list[Change]:
    """Return the flags that differ, less those that a continued run may change without a word."""
    if before.task != now.task:
        return [Change("task", before.task, now.task, is_fixed=True)]
    earlier, later = all_values(before), flat(recorded_values(now))
    bound = [key for key, value in later.items() if key.endswith(".optim") and value == "muon"]
    found = []
    for key in dict.fromkeys([*later, *earlier]):
        kind = resume_of(key, now.task)
        if kind != FREE and key != PLACE and earlier.get(key) != later.get(key):
            is_fixed = kind == FIXED or (bool(bound) and SHAPE.fullmatch(key) is not None)
            found.append(Change(key, earlier.get(key), later.get(key), is_fixed))
    return found


def allowed_changes(run: ResumableRun) -> list[str]:
    """Return the flags that a run lets differ from the run that it continues."""
    shape = [key for key in all_values(run) if SHAPE.fullmatch(key)]
    is_universal = isinstance(run, TrainedRun | LoopRun) and run.ds.use_universal_ckpt
    return [*run.ckpt.allow_changes, *(shape if is_universal else [])]


def is_allowed(change: Change, allowed: Collection[str]) -> bool:
    """Return whether ckpt.allow_changes lets a change through: by the flag's name, or by that of its section."""
    names = (change.key == name or change.key.startswith(f"{name}.") for name in allowed)
    return not change.is_fixed and any(names)


def refusal(found: Collection[Change], allowed: Collection[str], source: Path) -> Problem | None:
    """Return why a run cannot be continued with these changes; None where each of them is allowed."""
    refused = [change for change in found if not is_allowed(change, allowed)]
    if not refused:
        return None
    what = f"{source.parent} belongs to a run with other flags: {'; '.join(map(str, refused))}"
    back = "continue it with the earlier values"
    if any(change.is_fixed for change in refused):
        fixed = ", ".join(change.key for change in refused if change.is_fixed)
        return Problem(
            "ckpt.load_enable", what, f"{back}, or start a new run in another folder ({fixed} cannot change)"
        )
    if all(SHAPE.fullmatch(change.key) for change in refused):
        return Problem(
            "ckpt.load_enable", what, f"{back}, or add ds.use_universal_ckpt=true to continue it with the new ones"
        )
    keys = [*allowed, *(change.key for change in refused)]
    fix = f"{back}, or add 'ckpt.allow_changes=[{','.join(keys)}]' to continue it with the new ones"
    if any(change.key in LENGTHS for change in refused):
        fix += "; the learning-rate schedule is then that of the new number of steps"
    return Problem("ckpt.load_enable", what, fix)


def load_earlier(path: Path) -> Run | Problem:
    """Return the configuration of an earlier run, or say why it cannot be read."""
    try:
        return load(path)
    except (
        OSError,
        YAMLError,
        OmegaConfBaseException,
        ValueError,
        LookupError,
        AttributeError,
        AssertionError,
    ) as error:
        reason = str(error).strip().partition("\n")[0] or type(error).__name__
        fix = "restore it, or start a new run in another folder"
        return Problem("ckpt.load_enable", f"{path} cannot be read: {reason}", fix)
