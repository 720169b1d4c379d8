"""Run the jobs of a sweep as processes of this machine, a limited number at a time."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from rlhf_suite.errors import UserError
from rlhf_suite.run_folders.sweep_folder import Job, Sweep

POLL_S = 0.2
STOP_S, AT_ONCE_S = 60.0, 4.0  # for the jobs to end after a first, and after a second signal


def run_here(sweep: Sweep, jobs: list[Job], parallel: int, gpus_per_job: int | None) -> None:
    """Run `jobs` in order, `parallel` at a time. One at a time they write to the console, else each to
    `job.log` in its folder.

    Raises:
        UserError: fewer GPUs are visible than the jobs need.
    """
    slots: list[list[str] | None] = [*gpu_slots(parallel, gpus_per_job)]
    waiting = list(jobs)
    running: dict[int, tuple[Job, subprocess.Popen[bytes]]] = {}
    with stoppable(sweep, running):
        while waiting or running:
            for slot, (job, process) in list(running.items()):
                if process.poll() is not None:
                    del running[slot]
                    sweep.end(job, f"exit code {process.returncode}" if process.returncode else "")
            for slot in (free for free in range(parallel) if waiting and free not in running):
                job = waiting.pop(0)
                job.log = str(Path(job.folder) / "job.log") if parallel > 1 else ""
                sweep.begin(job)
                running[slot] = (job, start(job, slots[slot]))
            time.sleep(POLL_S)


def gpu_slots(parallel: int, gpus_per_job: int | None) -> Iterator[list[str] | None]:
    """Yield the GPUs of each slot, or None for each if a job may use all GPUs."""
    if gpus_per_job is None:
        yield from [None] * parallel
        return
    from rlhf_suite.launch.environment import list_gpus

    devices = list_gpus()
    if len(devices) < parallel * gpus_per_job:
        raise UserError(
            f"hydra.launcher: {parallel} jobs at a time with {gpus_per_job} GPUs each need {parallel * gpus_per_job} "
            f"GPUs, and {len(devices)} are visible: lower hydra.launcher.parallel or hydra.launcher.gpus_per_job"
        )
    for slot in range(parallel):
        yield devices[slot * gpus_per_job : (slot + 1) * gpus_per_job]


def start(job: Job, gpus: list[str] | None) -> subprocess.Popen[bytes]:
    """Start the process of a job, which ends with this one. Its output goes to its log file, or to the console if it
    has none."""
    command = [sys.executable, "-m", "rlhf_suite.cli.child", str(os.getpid()), *job.words]
    environment = os.environ | ({"CUDA_VISIBLE_DEVICES": ",".join(gpus)} if gpus is not None else {})
    if not job.log:
        return subprocess.Popen(command, env=environment)
    Path(job.folder).mkdir(parents=True, exist_ok=True)
    with Path(job.log).open("wb") as log:
        return subprocess.Popen(command, env=environment, stdout=log, stderr=subprocess.STDOUT)


@contextlib.contextmanager
def stoppable(sweep: Sweep, running: dict[int, tuple[Job, subprocess.Popen[bytes]]]) -> Iterator[None]:
    """End the running jobs when the block ends in any way, also by a signal. A second one ends them at once."""
    from rlhf_suite.launch.stop import leave_to_child
    from rlhf_suite.launch.stop import stoppable as signals_handled

    with signals_handled(), leave_to_child():
        try:
            yield
        finally:
            if running:
                said = "jobs of the sweep stop after their current steps; a second signal ends them at once"
                print(f"{len(running)} {said}", flush=True)
            try:
                end_all(running, STOP_S)
            finally:  # a second signal: the jobs get it too, and say in their folders that they were stopped
                end_all(running, AT_ONCE_S)
                for job, process in running.values():
                    process.kill()
                    sweep.end(job, "interrupted")


def end_all(running: dict[int, tuple[Job, subprocess.Popen[bytes]]], seconds: float) -> None:
    """Ask the running jobs to end, and wait at most so many seconds for all of them."""
    deadline = time.monotonic() + seconds
    for _, process in running.values():
        process.terminate()
    for _, process in running.values():
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(max(0.0, deadline - time.monotonic()))
