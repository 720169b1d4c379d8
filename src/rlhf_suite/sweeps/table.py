"""The table and the page of a sweep when its jobs have ended, or as it stands: `rlhf-suite sweep status <folder>`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rich.text import Text

from rlhf_suite.disk import write_text
from rlhf_suite.errors import UserError
from rlhf_suite.run_folders.sweep_folder import Job, Sweep, read
from rlhf_suite.sweeps.slurm_jobs import look
from rlhf_suite.tracking.tables import open_console, show_table

if TYPE_CHECKING:
    from rlhf_suite.report.sweep_data import SweptRun

COLUMNS = ("job", "overrides", "state", "metric", "seconds")


def show_status(folder: Path) -> int:
    """Print the table of the sweep in a folder with the states that its runs have now; return what `finish` does.

    Raises:
        UserError: the folder has no sweep.
    """
    sweep = read(folder)
    if sweep is None:
        raise UserError(f"{folder} is not the folder of a sweep: it has no summary.json")
    look(sweep)
    sweep.save()
    return finish(sweep.folder)


def finish(folder: Path) -> int:
    """Print the table and write it to summary.md, and write the page of the sweep; return exit code 1 if any job
    failed."""
    sweep = read(folder)
    assert sweep is not None, "launch writes it"
    rows = [row(job, sweep.list_varied_words(job)) for job in sweep.jobs]
    show_table(open_console(), Text(str(folder)), COLUMNS, rows)
    write_text(folder / "summary.md", markdown(rows))
    if not sweep.is_single and any((sweep.folder_of(job) / "metrics.jsonl").exists() for job in sweep.jobs):
        from rlhf_suite.report.html import try_writing

        print(try_writing(lambda: write_sweep_page(sweep)))
    failed = [job for job in sweep.jobs if job.state == "failed"]
    for job in failed:
        print(f"#{job.number} failed: {job.error}" + (f"\n    log: {job.log}" if job.log else ""))
    return 1 if failed else 0


def row(job: Job, varied: Sequence[str]) -> list[str]:
    """Return a job's cells. `varied` are the overrides that not all jobs have."""
    metric = f"{job.metric}={job.value:.4g}" if job.value is not None else ""
    seconds = f"{job.seconds:.0f}" if job.seconds else ""
    return [str(job.number), " ".join(varied), job.state, metric, seconds]


def markdown(rows: list[list[str]]) -> str:
    """Return the table in Markdown."""
    lines = [COLUMNS, ["---"] * len(COLUMNS), *rows]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in lines) + "\n"


def write_sweep_page(sweep: Sweep, target: Path | None = None) -> Path:
    """Write the page of a sweep: the statistics of each combination of its flags, and its runs beside each other."""
    from rlhf_suite.report.html import write_sweep_report

    return write_sweep_report(sweep.folder, runs_of(sweep), target)


def runs_of(sweep: Sweep) -> list[SweptRun]:
    """Return the runs of a sweep with the values of the flags that vary in it."""
    from rlhf_suite.report.sweep_data import read_sweep

    return read_sweep([(job.number, sweep.folder_of(job), job.overrides) for job in sweep.jobs])
