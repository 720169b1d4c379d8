"""The jobs of a sweep: what each one is, how it stands, and the record of them all in `summary.json`."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from rlhf_suite.disk import write_json
from rlhf_suite.errors import UserError
from rlhf_suite.tracking.run_folder import RunFolder

# What a run is judged by, the first of them that it has; else its first evaluation metric, or its first metric.
CHOSEN = ("eval/pass1", "eval/gpt_loss")


@dataclass
class Job:
    """One run of a sweep. `words` are its command line: `python run.py <words>` repeats it alone."""

    number: int
    overrides: list[str]
    folder: str
    words: list[str]
    state: str = "waiting"
    error: str = ""
    metric: str = ""
    value: float | None = None
    log: str = ""
    started: float = 0.0
    seconds: float = 0.0


@dataclass
class Sweep:
    """All jobs of a sweep; `folder`/summary.json always tells how they stand."""

    folder: Path
    jobs: list[Job]

    def save(self) -> None:
        write_json(self.folder / "summary.json", [asdict(job) for job in self.jobs])

    def begin(self, job: Job, state: str = "running") -> None:
        job.state, job.started = state, time.time()
        print(f"#{job.number} {state}: {' '.join(job.overrides)}{f' (log: {job.log})' if job.log else ''}", flush=True)
        self.save()

    def end(self, job: Job, reason: str = "") -> None:
        """Take over what the run wrote about its end; `reason` is for a run that could not write it."""
        status = RunFolder(Path(job.folder)).status()
        job.state = "done" if status["state"] == "done" and not reason else "failed"
        if job.state == "failed":
            job.error = status["error"] or reason or "ended without saying why"
        job.metric, job.value = chosen_metric(status.get("metrics") or {})
        job.seconds = round(time.time() - job.started, 1)
        print(f"#{job.number} {job.state} after {job.seconds:.0f} s", flush=True)
        self.save()


def chosen_metric(metrics: dict[str, float]) -> tuple[str, float | None]:
    """The name and value of the metric that a run is judged by; "" when it measured none."""
    evaluated = [name for name in metrics if name.startswith("eval/") and name.count("/") == 1]
    name = next((name for name in (*CHOSEN, *evaluated, *metrics) if name in metrics), "")
    return name, metrics.get(name)


def read(folder: Path) -> Sweep | None:
    """The record of a sweep, None where there is none."""
    path = folder / "summary.json"
    if not path.exists():
        return None
    try:
        return Sweep(folder, [Job(**row) for row in json.loads(path.read_text())])
    except (ValueError, TypeError):
        raise UserError(f"{path} is damaged: delete it, since the folders of the jobs keep their results") from None


def extended(folder: Path, jobs: Sequence[Job]) -> Sweep:
    """The sweep with more jobs: a sweeper launches them in batches, a resumed sweep launches the same ones again."""
    sweep = read(folder) or Sweep(folder, [])
    again = {job.number for job in jobs}
    sweep.jobs = [*(job for job in sweep.jobs if job.number not in again), *jobs]
    sweep.save()
    return sweep
