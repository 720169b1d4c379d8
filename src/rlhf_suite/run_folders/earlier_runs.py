"""What an earlier run in a folder means for a new one: at work, finished, to be continued, damaged, or configured
differently."""

from __future__ import annotations

import itertools
from pathlib import Path

from rlhf_suite.config.check.problems import Problem
from rlhf_suite.config.declarations.generate import output_file
from rlhf_suite.config.declarations.runs import Run
from rlhf_suite.config.declarations.task_groups import RESUMABLE
from rlhf_suite.disk import modified_at
from rlhf_suite.errors import FixableError, UserError
from rlhf_suite.foreign_files import DamagedFile
from rlhf_suite.locks import LOCK, holder_of
from rlhf_suite.run_folders.record import fingerprint
from rlhf_suite.run_folders.resume import changes, is_allowed, list_allowed_changes, load_earlier
from rlhf_suite.run_folders.run_folder import RunFolder
from rlhf_suite.run_folders.sweep_folder import read

METRICS_SHOWN = 6  # in the message about a finished run


def fresh(wished: Path) -> Path:
    """Make a folder that does not exist yet: `wished`, or with -1, -2, ... after it."""
    for number in itertools.count():
        folder = wished.with_name(f"{wished.name}-{number}") if number else wished
        try:
            folder.mkdir(parents=True)
        except FileExistsError:
            continue
        return folder
    raise AssertionError("unreachable: the count has no end")


def busy(folder: Path) -> Problem | None:
    """Return the problem of a folder that another run works in."""
    try:
        holder = holder_of(folder)
    except DamagedFile as damage:
        return Problem("run_dir", str(damage), f"delete {folder / LOCK} if no run works there")
    if holder is None:
        return None
    fix = "wait for its end, stop that process, or choose another folder with run_dir=<folder>"
    return Problem("run_dir", f"another run works in {folder} ({holder})", fix)


def find_damage(folder: Path) -> Problem | None:
    """Return the problem of a run or a sweep whose record cannot be read."""
    try:
        RunFolder(folder).status()
        read(folder)
    except FixableError as error:
        return Problem("run_dir", error.what, error.fix)
    return None


def newest_equal(run: Run, outputs: Path) -> Path | None:
    """Return the newest folder whose run was configured as this one, apart from what may differ in a continuation."""
    started = sorted(outputs.glob("*/status.json"), key=modified_at, reverse=True)
    return next((path.parent for path in started if is_earlier(RunFolder(path.parent), run)), None)


def is_earlier(record: RunFolder, run: Run) -> bool:
    """Return whether the run in a folder is one that `run` may continue. A folder that cannot be read holds none."""
    try:
        if record.status()["fingerprint"] == fingerprint(run):
            return True
    except UserError:
        return False
    allowed = list_allowed_changes(run)
    if not allowed or not record.config.exists():
        return False
    before = load_earlier(record.config)
    return isinstance(before, Run) and all(is_allowed(change, allowed) for change in changes(before, run))


def resumes(run: Run) -> bool:
    """Return whether the run wants to go on where an earlier one stopped; a tool that keeps no state cannot."""
    return run.task in RESUMABLE and run.ckpt.load_enable


def describe_finished(run: Run, folder: Path) -> str | None:
    """Return how the run in a folder ended, if it reached its end with these flags and its result is there."""
    record = RunFolder(folder)
    if run.task not in RESUMABLE or not run.ckpt.load_enable or record.status()["state"] != "done":
        return None
    before, result = load_earlier(record.config), result_of(run, record)
    if isinstance(before, Problem) or changes(before, run) or not result.exists():
        return None
    metrics = record.status()["metrics"]
    chosen = [name for name in metrics if name.startswith("eval/")] or list(metrics)
    shown = "".join(f", {name} {metrics[name]:.4g}" for name in chosen[:METRICS_SHOWN] if metrics[name] is not None)
    step = record.status()["last_step"]
    reached = f" after step {step}" if step else ""
    return f"the run in {folder} is finished{reached}{shown}. Its result is {result}; nothing is left to do"


def result_of(run: Run, record: RunFolder) -> Path:
    """Return where a run puts what it is made for: the model, or the rows."""
    if run.has("generate") and run.generate.benchmark is not None:
        return record.benchmarks
    if run.has("generate"):
        return output_file(run.generate.output_path, run.generate.shard, record.path / "generations.jsonl")
    if run.has("score"):
        return output_file(run.score.output_path, run.score.shard, record.path / "scores.jsonl")
    return Path(record.status().get("outputs", {}).get("actor") or run.ckpt.output_dir or record.model)


def keep_other_config(run: Run, record: RunFolder) -> None:
    """Keep the configuration of an earlier run with other flags as config.1.yaml, config.2.yaml, ..."""
    if not record.config.exists():
        return
    before = load_earlier(record.config)
    if isinstance(before, Problem) or changes(before, run):
        places = (record.path / f"config.{number}.yaml" for number in itertools.count(1))
        record.config.rename(next(place for place in places if not place.exists()))
