"""Runs of a task's own demo, cut to a few steps: `python run.py task=<task> ...` without the command line."""

from __future__ import annotations

import shlex
from dataclasses import replace
from pathlib import Path
from typing import Any

from rlhf_suite.config.declarations.metrics import is_known
from rlhf_suite.run_folders.run_folder import RunFolder
from rlhf_suite.tracking.metrics import read_rows


def small_run(world: Any, folder: Path, line: str) -> list[dict[str, float]]:
    """Run a command line in `folder`; the rows of its metrics."""
    from rlhf_suite.composition.arguments import parse
    from rlhf_suite.preflight.jobs import preflight

    found = preflight(parse([*shlex.split(line), "logger.progress=false"]))
    assert not found.problems, found.problems
    (run,) = found.runs
    RunFolder(folder).start("small")
    run_task(run, folder)
    rows = read_rows(RunFolder(folder).metrics)
    check_declared(rows)
    return rows


def check_declared(rows: list[dict[str, Any]]) -> None:
    """Assert that each metric of a run is declared."""
    unknown = {name for row in rows for name in row if "/" in name and not is_known(name)}
    assert not unknown, f"metrics that config/declarations/metrics.py does not declare: {unknown}"


def column(rows: list[dict[str, float]], name: str) -> list[float]:
    return [row[name] for row in rows if name in row]


def batch_run(world: Any, folder: Path, line: str) -> dict[str, float]:
    """Run a command line that writes rows, not metrics; the metrics of its end."""
    from rlhf_suite.composition.arguments import parse
    from rlhf_suite.preflight.jobs import preflight

    found = preflight(parse(shlex.split(line)))
    assert not found.problems, found.problems
    (run,) = found.runs
    folder.mkdir(parents=True, exist_ok=True)
    return run_task(run, folder)


def run_task(run: Any, folder: Path) -> dict[str, float]:
    """Run the task of a configuration as the command line does, with the plan that it resolves; its metrics."""
    import importlib

    from rlhf_suite.preflight.devices import launch_of, plan_workers

    task = importlib.import_module(f"rlhf_suite.tasks.{run.task}")
    plan = plan_workers(run)
    run = replace(run, launch=launch_of(run, plan))
    result: dict[str, float] = task.run(run, folder, *([] if plan is None else [plan]))
    return result
