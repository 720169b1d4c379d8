"""What a continued run may not change: the differences between the run that was and the run that is to go on."""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from rlhf_suite.config.check.formatting import show_value
from rlhf_suite.config.check.problems import Problem
from rlhf_suite.config.declarations.flag_types import spell
from rlhf_suite.config.declarations.flags import FIXED, FREE, NAMED, SHAPE, all_values, flat
from rlhf_suite.config.declarations.runs import Run, resume_of
from rlhf_suite.config.declarations.task_groups import TRAINING
from rlhf_suite.config.plan.run_plan import zero_stage
from rlhf_suite.run_folders.record import list_recorded_values, load

# These flags decide how many steps a run has, and so the learning rate of each of them.
LENGTHS = ("train.max_steps", "train.max_epochs", "train.num_episodes")
# Where a checkpoint was found does not change what is in it.
PLACE = "ckpt.path"
UNIVERSAL = "ds.use_universal_ckpt"
UNREADABLE = (OSError, YAMLError, OmegaConfBaseException, ValueError, LookupError, AttributeError, AssertionError)
# The parts that Muon's momentum is saved in depend on these flags of `ds`, and on the ranks of the model.
STAGE = "ds.zero_stage"
OWN_CODE = "own_code"  # what a run writes itself: its own files, each with its digest
MUON_SHAPE = (STAGE, "ds.zpg", "ds.adam_offload")


@dataclass(frozen=True)
class Change:
    """A flag that is not what it was."""

    key: str
    before: Any
    now: Any
    kind: str  # what the flag may do when a run is continued

    @property
    def is_fixed(self) -> bool:
        """Return whether no checkpoint can be loaded with another value."""
        return self.kind == FIXED

    @property
    def files(self) -> dict[str, str]:
        """Return the own files that differ, each with how."""
        before, now = (
            {entry.rpartition(" sha256:")[0] or entry.rpartition(" (")[0]: entry for entry in entries or []}
            for entries in (self.before, self.now)
        )
        names = [name for name in {**before, **now} if before.get(name) != now.get(name)]
        return {
            name: "is new" if name not in before else "is no longer used" if name not in now else "has other contents"
            for name in names
        }

    def __str__(self) -> str:
        if self.key == OWN_CODE:
            return f"{OWN_CODE}: {', '.join(f'{name} {how}' for name, how in self.files.items())}"
        return f"{self.key}: {show_value(self.before)} -> {show_value(self.now)}"


def changes(before: Run, now: Run) -> list[Change]:
    """Return the flags that differ, less those that a continued run may change without a word."""
    if before.task != now.task:
        return [Change("task", before.task, now.task, FIXED)]
    earlier, later = all_values(before), flat(list_recorded_values(now))
    if zero_stage(before) == zero_stage(now):
        earlier[STAGE] = later.get(STAGE)  # null stands for what the other says
    differing = []
    for key in dict.fromkeys([*later, *earlier]):
        kind = kind_of(key, now)
        if kind != FREE and key != PLACE and earlier.get(key) != later.get(key):
            differing.append(Change(key, earlier.get(key), later.get(key), kind))
    return differing


def kind_of(key: str, run: Run) -> str:
    """Return what a flag of a run may do when this run is continued: FREE, SHAPE, NAMED or FIXED."""
    kind = resume_of(key, run.task)
    if kind != SHAPE:
        return kind
    values = all_values(run)
    muon = [name.removesuffix("optim") for name, value in values.items() if name.endswith(".optim") and value == "muon"]
    if muon and (key in MUON_SHAPE or any(re.fullmatch(rf"{name}num_(nodes|gpus_per_node)", key) for name in muon)):
        return FIXED
    return SHAPE if UNIVERSAL in values else NAMED


def list_allowed_changes(run: Run) -> list[str]:
    """Return the flags that a run lets differ from the run that it continues."""
    shape = [key for key in all_values(run) if kind_of(key, run) == SHAPE]
    is_universal = run.task in TRAINING and run.ds.use_universal_ckpt
    return [*run.ckpt.allow_changes, *(shape if is_universal else [])]


def is_allowed(change: Change, allowed: Collection[str]) -> bool:
    """Return whether ckpt.allow_changes lets a change through: by the flag's name, or by that of its section."""
    names = (change.key == name or change.key.startswith(f"{name}.") for name in allowed)
    return not change.is_fixed and any(names)


def refusal(differing: Collection[Change], run: Run, allowed: Collection[str], source: Path) -> Problem | None:
    """Return why `run` cannot continue an earlier one with these changes; None where each of them is allowed."""
    refused = [change for change in differing if not is_allowed(change, allowed)]
    if not refused:
        return None
    problem = f"{source.parent} belongs to a run with other flags: {'; '.join(map(str, refused))}"
    back = f"continue it with the earlier {what_was(refused)}"
    if any(change.is_fixed for change in refused):
        fixed = [change.key for change in refused if change.is_fixed]
        muon = any(resume_of(key, run.task) == SHAPE for key in fixed)
        why = ": the momentum of Muon is saved as ZeRO and the ranks divide it" if muon else ""
        fix = f"{back}, or start a new run in another folder ({', '.join(fixed)} cannot change{why})"
        return Problem("ckpt.load_enable", problem, fix)
    if all(change.kind == SHAPE for change in refused):
        return Problem("ckpt.load_enable", problem, f"{back}, or add {UNIVERSAL}=true to continue it with the new ones")
    named = [key for key in allowed if key in run.ckpt.allow_changes or resume_of(key, run.task) != SHAPE]
    keys = [*named, *(change.key for change in refused)]
    fix = f"{back}, or add 'ckpt.allow_changes=[{','.join(keys)}]' to continue it with the new ones"
    if any(change.key in LENGTHS for change in refused):
        fix += "; the learning-rate schedule is then that of the new number of steps"
    return Problem("ckpt.load_enable", problem, fix)


def what_was(refused: Collection[Change]) -> str:
    """Return what to go back to: the values of flags, and the contents of own files, which no flag says."""
    words = " ".join(
        f"{change.key}={spell(change.before)}" for change in refused if change.key not in ("task", OWN_CODE)
    )
    edited = [
        name
        for change in refused
        if change.key == OWN_CODE
        for name, how in change.files.items()
        if words == "" or how == "has other contents"
    ]
    values = f"values ({words})" if words else "" if edited else "values"
    contents = f"contents of {', '.join(edited)}" if edited else ""
    return " and the earlier ".join(part for part in (values, contents) if part)


def load_earlier(path: Path) -> Run | Problem:
    """Return the configuration of an earlier run, or say why it cannot be read."""
    try:
        return load(path)
    except UNREADABLE as error:
        reason = str(error).strip().partition("\n")[0] or type(error).__name__
        fix = "restore it, or start a new run in another folder"
        return Problem("ckpt.load_enable", f"{path} cannot be read: {reason}", fix)
