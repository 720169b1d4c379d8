"""Inspect the places to which a run writes, and the earlier run that it continues.

A model or a file of rows must not replace anything that this run did not write. It must not be put where the run itself
works or reads, and the place must be writable. A continued run must have the flags of the earlier run.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from rlhf_suite.config.check.problems import Problem
from rlhf_suite.config.declarations.ckpt import NO_METRIC
from rlhf_suite.config.declarations.flags import all_values
from rlhf_suite.config.declarations.generate import output_file
from rlhf_suite.config.declarations.runs import Run
from rlhf_suite.config.declarations.task_groups import LOOPS, RESUMABLE, RL, TRAINED, TRAINING
from rlhf_suite.disk import cache_root, resolve_home, unwritable
from rlhf_suite.errors import UserError
from rlhf_suite.foreign_files import DamagedFile, read_table
from rlhf_suite.run_folders.resume import changes, list_allowed_changes, load_earlier, refusal
from rlhf_suite.run_folders.run_folder import RunFolder
from rlhf_suite.train.checkpoint import optimizer_problem, store_of
from rlhf_suite.train.output import MARK, files, is_own, is_within

SOURCES = (
    *("data.dataset", "data.prompt_dataset", "data.pretrain_dataset", "eval.dataset"),
    *("reward.remote_url", "reward.rubric", "lora.path"),
)
SHOWN = 3  # entries of a folder in a message
CACHE = "XDG_CACHE_HOME"


@dataclass(frozen=True)
class Target:
    """Something that a run will write: the flag that names it, its path, and whether it is a folder."""

    key: str
    path: Path
    is_folder: bool = True

    def problem(self, reason: str) -> Problem:
        """Return the problem of this target."""
        kind = "folder that does not exist yet" if self.is_folder else "file that does not exist yet"
        return Problem(self.key, f"{self.path} {reason}", f"write {self.key}=<a {kind}>")


def outputs_change_nothing(run: Run, folder: Path | None) -> Iterator[Problem]:
    """Yield a problem for every target that exists already, clashes with the run itself, or cannot be written."""
    for target in targets(run):
        reason = find_foreign_output(target, run, folder) or clash(target, run, folder) or explain_refusal(target)
        if reason is not None:
            yield target.problem(reason)


def targets(run: Run) -> Iterator[Target]:
    """Yield what the run will write outside of its own folder. Symbolic links are followed."""
    if run.task in (*TRAINING, "merge_lora") and run.ckpt.output_dir is not None:
        output = resolve(run.ckpt.output_dir)
        for suffix in model_suffixes(run):
            yield Target("ckpt.output_dir", output.with_name(output.name + suffix) if suffix else output)
    for section, options in (
        ("generate", run.generate if run.has("generate") else None),
        ("score", run.score if run.has("score") else None),
    ):
        if options is not None and options.output_path:
            path = output_file(options.output_path, options.shard, Path())
            yield Target(f"{section}.output_path", resolve(path), is_folder=False)


def model_suffixes(run: Run) -> list[str]:
    """Return the suffixes of the folders of all models that a run writes; the main model has no suffix."""
    suffixes = [""]
    if run.task in TRAINED and run.ckpt.best_metric_key not in (None, NO_METRIC):
        suffixes += ["_best"]
    averages = [f"{suffix}_ema" for suffix in suffixes if run.task in RL and run.train.enable_ema]
    if run.task in RL:
        suffixes += ["_critic"] * run.critic.save_value_network
    if run.task in TRAINED and run.ckpt.save_adapter:
        suffixes += [f"{suffix}_adapter" for suffix in suffixes]
    suffixes += averages
    return suffixes


def resolve(path: str | Path) -> Path:
    """Return an absolute path without symbolic links and `~`."""
    return Path(os.path.realpath(resolve_home(path)))


def find_foreign_output(target: Target, run: Run, folder: Path | None) -> str | None:
    """Return what is at the target and was not written by this run, or None."""
    try:
        if not target.path.exists():
            return None
    except OSError as error:
        return f"cannot be written: {error.strerror}"
    if target.is_folder:
        return find_foreign_model(target.path, run, folder)
    continues = run.task in RESUMABLE and run.ckpt.load_enable and target.path.is_file()
    has_begun = folder is None or (folder / "progress.json").exists()
    return None if continues and has_begun else "exists already"


def find_foreign_model(path: Path, run: Run, folder: Path | None) -> str | None:
    """Return what the folder for a model holds already, or None if this run may write there."""
    if not path.is_dir():
        return "is a file"
    if Path.cwd().resolve().is_relative_to(path):
        return "is the current folder, or contains it"
    keep = checkpoints_within(path, run)
    kept = {keep.relative_to(path).parts[0]} if keep is not None else set()
    entries = sorted(entry.name for entry in path.iterdir() if entry.name not in kept or any(files(entry, keep)))
    if not entries or ((path / MARK).exists() if folder is None else is_own(path, run_ids(run, folder), keep)):
        return None
    shown = ", ".join(entries[:SHOWN]) + (f" and {len(entries) - SHOWN} more" if len(entries) > SHOWN else "")
    return f"contains files that this run did not write ({shown})"


def checkpoints_within(path: Path, run: Run) -> Path | None:
    """Return the folder of the run's checkpoints if it is inside the folder of a model, where it stays."""
    keep = resolve(run.ckpt.path) if run.task in TRAINED and run.ckpt.path is not None else None
    return keep if keep is not None and is_within(keep, path) else None


def run_ids(run: Run, folder: Path) -> set[str]:
    """Return the ids of this run, of its stages if it is a loop, and of the run whose checkpoints it continues."""
    folders = [folder, *folder.glob("iter_*/*/")] if run.task in LOOPS else [folder]
    ids = {RunFolder(run_folder).run_id for run_folder in folders}
    if run.task in TRAINED and run.ckpt.load_enable and run.ckpt.path is not None:
        for state in resolve(run.ckpt.path).glob("*/state.json"):
            try:
                ids.add(read_table(state, {"run": str})["run"])
            except (DamagedFile, KeyError):  # a damaged checkpoint is another inspection's subject
                continue
    return ids - {""}


def clash(target: Target, run: Run, folder: Path | None) -> str | None:
    """Return which path of the run itself is at the target, contains it, or is inside it; None if there is none."""
    path = target.path
    if folder is not None and target.is_folder and resolve(folder).is_relative_to(path):
        return "is the run folder, or contains it"
    for key, read, is_folder in read_by(run):
        if path == read:
            return f"is also {key}, which this run reads"
        if read.is_relative_to(path) and read != checkpoints_within(path, run):
            return f"contains {key}={read}, which this run reads"
        if is_folder and path.is_relative_to(read):
            return f"is inside {key}={read}, which this run reads"
    return None


def read_by(run: Run) -> Iterator[tuple[str, Path, bool]]:
    """What the run reads on this machine: the flag that names it, the path, and whether that is a folder."""
    for key, value in all_values(run).items():
        if isinstance(value, str) and (key.endswith("model_name_or_path") or key in SOURCES):
            for name in value.split(","):
                if path := local(name.strip().partition("@")[0]):
                    yield key, path, path.is_dir()
    if run.task in TRAINED and run.ckpt.path is not None:
        yield "ckpt.path", resolve(run.ckpt.path), True
    try:
        cache = resolve(cache_root())
    except UserError:
        return
    yield from ((f"the cache ({CACHE})", cache / kind, True) for kind in ("encoded", "annotations"))


def local(name: str) -> Path | None:
    """Return the path that a name means, or None if nothing exists there."""
    try:
        return resolve(name) if name and resolve_home(name).exists() else None
    except (OSError, RuntimeError, ValueError):
        return None


def explain_refusal(target: Target) -> str | None:
    """Return why nothing can be written at the target, or None."""
    if target.is_folder and target.path.is_dir() and os.path.ismount(target.path):
        return "is the root of a disk, which cannot be replaced by a model; name a folder inside it"
    reason = unwritable(target.path.parent / target.path.name) if not target.path.exists() else None
    reason = reason or unwritable(target.path.parent)
    return reason and f"cannot be written: {reason}"


def checkpoints_have_a_place(run: Run, folder: Path | None) -> Iterator[Problem]:
    """Yield a problem if ckpt.path is not writable or has checkpoints of another run."""
    if run.task not in TRAINED or run.ckpt.path is None:
        return
    path = resolve(run.ckpt.path)
    if reason := unwritable(path):
        yield Problem("ckpt.path", f"{path} cannot be written: {reason}", "write ckpt.path=<another folder>")
    elif not run.ckpt.load_enable and (manifests := sorted(path.glob("*_[0-9]*/manifest.json"))):
        fix = "add ckpt.load_enable=true to continue from them, or choose another ckpt.path"
        yield Problem("ckpt.path", f"{path} contains checkpoints of an earlier run ({manifests[-1].parent.name})", fix)


def cache_is_writable(run: Run, folder: Path | None) -> Iterator[Problem]:
    """Yield a problem if the run needs the cache folder and cannot write to it."""
    flags = all_values(run)
    needs = flags.get("data.cache_enable") or any(str(value).startswith("builtin:") for value in flags.values())
    if not needs:
        return
    fix = f"set the environment variable {CACHE} to a folder that you may write to"
    try:
        reason = unwritable(cache_root())
    except UserError as error:
        yield Problem(CACHE, str(error), fix)
        return
    if reason is not None and not cache_root().is_dir():  # an existing cache may hold all that is needed
        yield Problem(CACHE, f"the cache folder {cache_root()} cannot be written: {reason}", fix)


def resume_fits(run: Run, folder: Path | None) -> Iterator[Problem]:
    """Yield a problem if a continued run has other flags than the earlier run, except for ckpt.allow_changes."""
    if folder is None or run.task not in RESUMABLE or not run.ckpt.load_enable:
        return
    record = RunFolder(folder)
    source = earlier_config(run, record)
    if source is None:
        return
    before = load_earlier(source)
    if isinstance(before, Problem):
        yield before
        return
    problem = refusal(changes(before, run), run, list_allowed_changes(run), source)
    if problem is None and run.task in TRAINED and (newest := store_of(run.ckpt, record).latest()) is not None:
        problem = optimizer_problem(newest, run.ckpt)
    if problem is not None:
        yield problem


def earlier_config(run: Run, record: RunFolder) -> Path | None:
    """Return the configuration file of the run that is continued, or None if that run has done nothing yet."""
    if run.task in TRAINED:
        newest = store_of(run.ckpt, record).latest()
        if newest is not None and newest.config.exists():
            return newest.config
        is_done = record.status()["state"] == "done"
        return record.config if is_done and record.config.exists() else None
    begun = record.loop if run.task in LOOPS else record.path / "progress.json"
    return record.config if begun.exists() and record.config.exists() else None


OUTPUTS = (outputs_change_nothing, checkpoints_have_a_place, cache_is_writable)
