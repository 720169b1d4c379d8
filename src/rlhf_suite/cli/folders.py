"""Where a run lives: a new folder, the one the user names, or the one of the run that it continues."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from rlhf_suite.cli.nodes import node_problem
from rlhf_suite.config.problems import Problem
from rlhf_suite.config.resolve import fingerprint
from rlhf_suite.config.runs import ResumableRun, Run, TrainedRun
from rlhf_suite.launch.slurm import allocation
from rlhf_suite.train.run_folder import RunFolder

if TYPE_CHECKING:
    from rlhf_suite.cli.preflight import Preflight


@dataclass(frozen=True)
class Place:
    """A run's folder, and what to tell the user about it."""

    folder: Path
    note: str = ""


def for_run(found: Preflight) -> Place | Problem:
    """The folder of a single run that passed the preflight."""
    (run,) = found.runs
    here = allocation()
    nodes = 1 if here is None else here.num_nodes
    if (problem := node_problem(run, "task", nodes, "start it on one of them: srun --nodes=1 --ntasks=1")) is not None:
        return problem
    if found.chosen_folder:
        return chosen(found.folder, run)
    if here is not None:
        what = f"the {here.num_nodes} nodes of this Slurm job need one folder that all of them know"
        return Problem("hydra.run.dir", what, "add hydra.run.dir=<folder>, or use hydra/launcher=slurm")
    if not resumes(run) or (isinstance(run, TrainedRun) and run.ckpt.path is not None):
        return Place(fresh(found.folder))
    outputs = found.folder.parent
    if earlier := newest_equal(run, outputs):
        return Place(earlier, f"continuing the run in {earlier}")
    return Place(fresh(found.folder), f"ckpt.load_enable: no run of this configuration in {outputs}, starting afresh")


def chosen(folder: Path, run: Run) -> Place | Problem:
    """The folder that the user names: a run in it is continued, but not by accident."""
    here = allocation()
    is_first = here is None or here.rank == 0  # on later nodes the run may have begun
    if is_first and RunFolder(folder).status_file.exists() and not resumes(run):
        fix = "add ckpt.load_enable=true to continue it, or choose another folder"
        return Problem("hydra.run.dir", f"{folder} holds a run already", fix)
    return Place(folder)


def resumes(run: Run) -> bool:
    """Whether the run wants to go on where an earlier one stopped; a tool that keeps no state cannot."""
    return isinstance(run, ResumableRun) and run.ckpt.load_enable


def fresh(wished: Path) -> Path:
    """Make a folder that nobody has: `wished`, or with -1, -2, ... behind it."""
    for number in itertools.count():
        folder = wished.with_name(f"{wished.name}-{number}") if number else wished
        try:
            folder.mkdir(parents=True)
        except FileExistsError:
            continue
        return folder
    raise AssertionError("unreachable: the count has no end")


def newest_equal(run: Run, outputs: Path) -> Path | None:
    """The newest folder whose run was configured as this one (apart from what may differ in a continuation)."""
    wanted = fingerprint(run)
    started = sorted(outputs.glob("*/status.json"), key=lambda path: path.stat().st_mtime, reverse=True)
    folders = (path.parent for path in started)
    return next((folder for folder in folders if RunFolder(folder).status()["fingerprint"] == wanted), None)
