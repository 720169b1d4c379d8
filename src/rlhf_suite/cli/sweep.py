"""The jobs of a sweep, the record of their states in `summary.json`, and the table at the end."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from rlhf_suite.disk import write_json, write_text
from rlhf_suite.errors import UserError
from rlhf_suite.locks import is_alive
from rlhf_suite.tracking.run_folder import RunFolder

# The table shows the first of these metrics that a run has, else its first evaluation metric, or its first metric.
CHOSEN = ("eval/pass1", "eval/gpt_loss")
REFUSED = 2
USAGE = """usage: rlhf-suite sweep status <folder>

Prints the table of a sweep with the states that its runs have now, and writes it to summary.md in the folder. It is for
sweeps that nobody waits for (hydra.launcher.wait=false), and for a single run that was submitted to Slurm. The exit
code is 1 if a job failed, and 2 if the folder has no sweep."""
COLUMNS = ("job", "overrides", "state", "metric", "seconds")


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
        self.metric, self.value = chosen_metric(status.get("metrics") or {})

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


def chosen_metric(metrics: dict[str, float]) -> tuple[str, float | None]:
    """Return the name and value of the metric that the table shows for a run; the name is "" if there is none."""
    evaluated = [name for name in metrics if name.startswith("eval/") and name.count("/") == 1]
    name = next((name for name in (*CHOSEN, *evaluated, *metrics) if name in metrics), "")
    return name, metrics.get(name)


def read(folder: Path) -> Sweep | None:
    """Return the record of a sweep, or None if the folder has none.

    Raises:
        UserError: the file is damaged.
    """
    path = folder / "summary.json"
    if not path.exists():
        return None
    try:
        return Sweep(folder, [Job(**row) for row in json.loads(path.read_text())])
    except (ValueError, TypeError):
        raise UserError(f"{path} is damaged: delete it, since the folders of the jobs keep their results") from None


def show(words: Sequence[str]) -> int:
    """Do `rlhf-suite sweep status <folder>`; return the exit code."""
    if len(words) != 2 or words[0] != "status":
        asked = words[:1] in (["-h"], ["--help"])
        print(USAGE, file=sys.stdout if asked else sys.stderr)
        return 0 if asked else REFUSED
    from rlhf_suite.cli.slurm_jobs import look

    try:
        sweep = read(Path(words[1]).expanduser())
        if sweep is None:
            raise UserError(f"{words[1]} is not the folder of a sweep: it has no summary.json")
        look(sweep)
        return finish(sweep.folder)
    except UserError as error:
        print(error, file=sys.stderr)
        return REFUSED


def extended(folder: Path, jobs: Sequence[Job]) -> Sweep:
    """Return the sweep with these jobs. In a sweep that is started again, they replace its earlier rows."""
    sweep = read(folder) or Sweep(folder, [])
    before = {job.number: job for job in sweep.jobs}
    for job in jobs:
        if job.number in before:
            job.seconds = before.pop(job.number).seconds
    sweep.jobs = sorted([*before.values(), *jobs], key=lambda job: job.number)
    sweep.save()
    return sweep


def finish(folder: Path) -> int:
    """Print the table and write it to summary.md, and write the page of the sweep; return exit code 1 if any job
    failed."""
    sweep = read(folder)
    assert sweep is not None, "launch writes it"
    common = set.intersection(*(set(job.overrides) for job in sweep.jobs)) if len(sweep.jobs) > 1 else set()
    rows = [row(job, common) for job in sweep.jobs]
    table = Table(*COLUMNS, title=Text(str(folder)))
    for cells in rows:
        table.add_row(*map(Text, cells))  # an override such as [q_proj] is not markup
    Console().print(table)
    write_text(folder / "summary.md", markdown(rows))
    if not sweep.is_single and any((folder_of(sweep, job) / "metrics.jsonl").exists() for job in sweep.jobs):
        from rlhf_suite.report.html import tried

        print(tried(lambda: write_sweep_page(sweep)))
    failed = [job for job in sweep.jobs if job.state == "failed"]
    for job in failed:
        print(f"#{job.number} failed: {job.error}" + (f"\n    log: {job.log}" if job.log else ""))
    return 1 if failed else 0


def write_sweep_page(sweep: Sweep, target: Path | None = None) -> Path:
    """Write the page of a sweep: the statistics of each combination of its flags, and its runs beside each other."""
    from rlhf_suite.report.html import write_sweep_report
    from rlhf_suite.report.sweep_data import swept

    jobs = [(job.number, folder_of(sweep, job), job.overrides) for job in sweep.jobs]
    return write_sweep_report(sweep.folder, swept(jobs), target)


def folder_of(sweep: Sweep, job: Job) -> Path:
    """Return the folder of a job, also if the folder of the sweep was moved."""
    moved = sweep.folder / Path(job.folder).name
    return moved if moved.exists() else Path(job.folder)


def row(job: Job, common: set[str]) -> list[str]:
    """Return a job's cells without the overrides that all jobs have in common."""
    varied = " ".join(word for word in job.overrides if word not in common)
    metric = f"{job.metric}={job.value:.4g}" if job.value is not None else ""
    seconds = f"{job.seconds:.0f}" if job.seconds else ""
    return [str(job.number), varied, job.state, metric, seconds]


def markdown(rows: list[list[str]]) -> str:
    """Return the table in Markdown."""
    lines = [COLUMNS, ["---"] * len(COLUMNS), *rows]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in lines) + "\n"
