"""The table at the end of a sweep: one row per job, on the console and in summary.md beside summary.json."""

from __future__ import annotations

from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from rlhf_suite.cli.sweep import Job, read
from rlhf_suite.disk import write_text

COLUMNS = ("job", "overrides", "state", "metric", "seconds")


def finish(folder: Path) -> int:
    """Print and write the table. Exit code 1 if any job failed."""
    sweep = read(folder)
    if sweep is None:  # another launcher than ours keeps no record
        return 0
    common = set.intersection(*(set(job.overrides) for job in sweep.jobs)) if len(sweep.jobs) > 1 else set()
    rows = [row(job, common) for job in sweep.jobs]
    table = Table(*COLUMNS, title=Text(str(folder)))
    for cells in rows:
        table.add_row(*map(Text, cells))  # an override such as [q_proj] is not markup
    Console().print(table)
    write_text(folder / "summary.md", markdown(rows))
    failed = [job for job in sweep.jobs if job.state == "failed"]
    for job in failed:
        print(f"#{job.number} failed: {job.error}" + (f"\n    log: {job.log}" if job.log else ""))
    return 1 if failed else 0


def row(job: Job, common: set[str]) -> list[str]:
    """A job's cells; overrides that all jobs have in common are left out."""
    varied = " ".join(word for word in job.overrides if word not in common)
    metric = f"{job.metric}={job.value:.4g}" if job.value is not None else ""
    seconds = f"{job.seconds:.0f}" if job.seconds else ""
    return [str(job.number), varied, job.state, metric, seconds]


def markdown(rows: list[list[str]]) -> str:
    lines = [COLUMNS, ["---"] * len(COLUMNS), *rows]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in lines) + "\n"
