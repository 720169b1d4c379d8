"""The folder of a sweep: its jobs, and the record of their states in `summary.json`."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rlhf_suite.disk import write_json
from rlhf_suite.errors import FixableError
from rlhf_suite.foreign_files import DamagedFile, check_types, read_json
from rlhf_suite.locks import is_alive
from rlhf_suite.run_folders.run_folder import RunFolder

# The table shows the first of these metrics that a run has, else its first evaluation metric, or its first metric.
CHOSEN = ("eval/pass1", "eval/gpt_loss")


# What summary.json says of a job, and of which type each is.
FIELDS: dict[str, Any] = {
    **dict.fromkeys(("folder", "state", "error", "metric", "log", "slurm"), str),
    **{"number": int, "overrides": list[str], "words": list[str]},
    **{"value": float | None, "started": float, "seconds": float},
}


@dataclass
class Job:
    """One run of a sweep. `words` is its command line: `python run.py <words>` runs this job alone."""

    number: int
    overrides: list[str]
    folder: str
    words: list[str]
    state: str = "waiting"
    error: str = ""
    metric: str = ""
    value: float | None = None
    log: str = ""
    slurm: str = ""  # its id, where it is a job of Slurm
    started: float = 0.0
    seconds: float = 0.0

    def end(self, status: dict[str, Any], reason: str = "") -> None:
        """Take over the status of the run, which has ended; with a `reason` it has failed whatever it says."""
        self.state = "done" if status["state"] == "done" and not reason else "failed"
        self.error = "" if self.state == "done" else status["error"] or reason or "ended without an error message"
        self.metric, self.value = choose_metric(status.get("metrics") or {})

    def look(self, status: dict[str, Any]) -> None:
        """Take over the status that the run has now; a run that does not exist yet leaves the state as it is."""
        if status["state"] == "running" and is_alive(status):
            self.state = "running"
        elif status["state"] != "new":
            self.end(status, "it was killed" if status["state"] == "running" else "")


@dataclass
class Sweep:
    """All jobs of a sweep, or a single run on Slurm. `folder`/summary.json always holds their present states."""

    folder: Path
    jobs: list[Job]

    @property
    def is_single(self) -> bool:
        """Return whether this is a single run on Slurm, whose folder has a page of its own."""
        return [Path(job.folder).name for job in self.jobs] == [self.folder.name]

    def folder_of(self, job: Job) -> Path:
        """Return the folder of a job, also if the folder of the sweep was moved."""
        moved = self.folder / Path(job.folder).name
        return moved if moved.exists() else Path(job.folder)

    def list_varied_words(self, job: Job) -> list[str]:
        """Return the overrides of a job that not all jobs have."""
        common = set.intersection(*(set(one.overrides) for one in self.jobs)) if len(self.jobs) > 1 else set()
        return [word for word in job.overrides if word not in common]

    def save(self) -> None:
        """Write summary.json."""
        write_json(self.folder / "summary.json", [asdict(job) for job in self.jobs])

    def begin(self, job: Job, state: str = "running") -> None:
        """Record and print that a job has started."""
        job.state, job.started = state, time.time()
        print(f"#{job.number} {state}: {' '.join(job.overrides)}{f' (log: {job.log})' if job.log else ''}", flush=True)
        self.save()

    def end(self, job: Job, reason: str = "") -> None:
        """Record how a job ended, by the status that its run wrote, or by `reason` if the run could not write one."""
        job.end(RunFolder(Path(job.folder)).status(), reason)
        job.seconds = round(time.time() - job.started, 1)
        print(f"#{job.number} {job.state} after {job.seconds:.0f} s", flush=True)
        self.save()

    def keep(self, job: Job) -> None:
        """Record that a job is not started, because its run is done."""
        job.end(RunFolder(Path(job.folder)).status())
        print(f"#{job.number} is done already: {' '.join(job.overrides)}", flush=True)
        self.save()


def choose_metric(metrics: dict[str, float]) -> tuple[str, float | None]:
    """Return the name and value of the metric that the table shows for a run; the name is "" if there is none."""
    evaluated = [name for name in metrics if name.startswith("eval/") and name.count("/") == 1]
    name = next((name for name in (*CHOSEN, *evaluated, *metrics) if name in metrics), "")
    return name, metrics.get(name)


def read(folder: Path) -> Sweep | None:
    """Return the record of a sweep, or None if the folder has none.

    Raises:
        FixableError: the file is damaged.
    """
    path = folder / "summary.json"
    if not path.exists():
        return None
    try:
        rows = read_json(path)
        return Sweep(folder, [Job(**check_types(row, FIELDS, path)) for row in rows])
    except (DamagedFile, TypeError) as damage:
        problem = str(damage) if isinstance(damage, DamagedFile) else f"{path} is damaged"
        raise FixableError(problem, "delete it, since the folders of the jobs keep their results") from None


def extend_sweep(folder: Path, jobs: Sequence[Job]) -> Sweep:
    """Return the sweep with these jobs. In a sweep that is started again, they replace its earlier rows."""
    sweep = read(folder) or Sweep(folder, [])
    before = {job.number: job for job in sweep.jobs}
    for job in jobs:
        if job.number in before:
            job.seconds = before.pop(job.number).seconds
    sweep.jobs = sorted([*before.values(), *jobs], key=lambda job: job.number)
    sweep.save()
    return sweep
