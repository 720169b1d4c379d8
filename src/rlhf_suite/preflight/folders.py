"""Where a run lives: a new folder, the one that the user names, or that of the run that it continues.

This asks Slurm for the nodes of the run and the store of its checkpoints, so it cannot be in `run_folders`, where
`earlier_runs.py` says what an earlier run in a folder means for the new one.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from rlhf_suite.config.check.problems import Problem
from rlhf_suite.config.declarations.runs import Run
from rlhf_suite.config.declarations.task_groups import LOOPS, RESUMABLE, TRAINED
from rlhf_suite.disk import resolve_home, unwritable
from rlhf_suite.launch.slurm import allocation, is_first_node
from rlhf_suite.locks import LOCK, alone_in
from rlhf_suite.preflight.inspections.outputs import targets
from rlhf_suite.preflight.jobs import Preflight, node_problem, too_few_nodes
from rlhf_suite.run_folders.earlier_runs import busy, find_damage, fresh, newest_equal, resumes
from rlhf_suite.run_folders.run_folder import RunFolder
from rlhf_suite.train.checkpoint import store_of

# What a run writes in its folder, and would write over.
RUN_FILES = (
    *("config.yaml", "metrics.jsonl", "status.json", "run.log", "error.log", "curves.png", "samples.md", "loop.json"),
    "report.html",
    *("checkpoints", "evaluations", "logs", "model", "rollouts", "progress.json", "generations.jsonl", "scores.jsonl"),
)


@dataclass(frozen=True)
class Place:
    """A run's folder, and a remark about it for the user."""

    folder: Path
    note: str = ""
    is_new: bool = False  # made for this run, with nothing in it yet

    def give_up(self) -> None:
        """Remove what was made for a run that is refused after all."""
        if self.is_new:
            with contextlib.suppress(OSError):
                self.folder.rmdir()
                for parent in self.folder.parents[:2]:
                    parent.rmdir()


def for_run(checked: Preflight) -> Place | Problem:
    """Return the folder of a single run that passed the preflight."""
    (run,) = checked.runs
    here = allocation()
    nodes = 1 if here is None else here.num_nodes
    problem = node_problem(run, "task", nodes, "start it on one of them: srun --nodes=1 --ntasks=1")
    if problem is None and not checked.is_submitted:
        problem = too_few_nodes(run, nodes)
    if problem is not None:
        return problem
    if checked.chosen_folder:
        return choose_folder(checked.folder, run)
    if here is not None:
        need = f"the {here.num_nodes} nodes of this Slurm job need one folder that all of them can reach"
        return Problem("run_dir", need, "add run_dir=<folder>, or use hydra/launcher=slurm")
    outputs, note = checked.folder.parent, ""
    if resumes(run) and not (run.task in TRAINED and run.ckpt.path is not None):
        if earlier := newest_equal(run, outputs):
            return busy(earlier) or Place(earlier, f"continuing the run in {earlier}")
        note = f"ckpt.load_enable: no run of this configuration in {outputs}, starting a new run"
    if reason := unwritable(outputs):
        return Problem("run_dir", f"{outputs.absolute()} cannot hold a run: {reason}", "add run_dir=<folder>")
    return Place(fresh(checked.folder), note, is_new=True)


def choose_folder(folder: Path, run: Run) -> Place | Problem:
    """Return the folder that the user names: a run in it is continued, but not by accident."""
    if (reason := unwritable(folder)) is not None:
        return Problem("run_dir", f"{folder} cannot hold a run: {reason}", "choose another folder")
    if not is_first_node():
        return Place(folder)  # the run may have begun
    if problem := busy(folder) or find_damage(folder):
        return problem
    if not (folder / LOCK).exists() and not RunFolder(folder).status_file.exists():
        if foreign := sorted(name for name in RUN_FILES if (folder / name).exists()):
            danger = f"{folder} is not a run's folder, and a run would write over its {', '.join(foreign)}"
            return Problem("run_dir", danger, "choose a new folder")
    elif RunFolder(folder).has_progress and not resumes(run):
        can = run.task in RESUMABLE
        fix = ("add ckpt.load_enable=true to continue it, or " if can else "") + "choose another folder"
        return Problem("run_dir", f"{folder} holds a run already", fix)
    return Place(folder)


def for_sweep(checked: Preflight) -> Path | Problem:
    """Return the folder of a sweep that passed the preflight, whose jobs each write somewhere else."""
    for (key, path), jobs in Counter(
        (target.key, target.path) for run in checked.runs for target in targets(run)
    ).items():
        if jobs > 1:
            fix = f"remove {key}, or name a flag in it that differs, for example {key}='{path}-${{train.seed}}'"
            return Problem(key, f"{jobs} jobs of the sweep would write {path}", fix)
    place = checked.folder if checked.chosen_folder else checked.folder.parent
    if reason := unwritable(place):
        return Problem("run_dir", f"{place} cannot hold a sweep: {reason}", "add run_dir=<folder>")
    return (find_damage(checked.folder) or checked.folder) if checked.chosen_folder else fresh(checked.folder)


@contextlib.contextmanager
def lock_folders(folder: Path, run: Run) -> Iterator[None]:
    """Keep other runs out of the folder and, where that is elsewhere, of the run's checkpoints."""
    with contextlib.ExitStack() as stack:
        if is_first_node():
            shared = resolve_home(run.ckpt.path) if run.task in TRAINED and run.ckpt.path else None
            for key, place in (("run_dir", folder), ("ckpt.path", shared)):
                if place is not None:
                    stack.enter_context(alone_in(place, f"{key}={place}"))
        yield


def how_to_continue(run: Run, folder: Path) -> str:
    """Return what to tell the user of a run that was stopped: from where it can go on, if from anywhere."""
    if run.task not in RESUMABLE:
        return ""
    record, again = RunFolder(folder), "with the same command and ckpt.load_enable=true"
    if run.task not in TRAINED:
        begun = record.loop if run.task in LOOPS else record.path / "progress.json"
        return f"; continue where it was {again}" if begun.exists() else "; nothing was saved yet"
    newest = store_of(run.ckpt, record).latest()
    if newest is not None:
        return f"; continue after step {newest.step} {again}"
    never = " (ckpt.save_steps=-1)" if run.ckpt.save_steps == -1 else ""
    return f"; no checkpoint was saved{never}, so it cannot be continued"
