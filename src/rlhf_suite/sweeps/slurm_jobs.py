"""Submit the jobs of a sweep as one Slurm array, or a single run, and watch them by squeue and by the status of their
runs.

The status.json of a run says how it ended. squeue only says whether Slurm still has the job. So accounting (sacct) is
not needed, and a job that was killed before it could write its status is noticed too.
"""

from __future__ import annotations

import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlhf_suite.config.declarations.launchers import PREFIX
from rlhf_suite.config.declarations.task_groups import RESUMABLE
from rlhf_suite.errors import UserError
from rlhf_suite.launch.actor_log import tail_lines
from rlhf_suite.launch.slurm import allocation, show_job
from rlhf_suite.run_folders.run_folder import RunFolder
from rlhf_suite.run_folders.sweep_folder import Job, Sweep

Main = Callable[[list[str]], int]  # the command line: it takes its words, and returns its exit code
GONE_POLLS = 3  # squeue may not list a job for a moment while it is queued again
UNKNOWN = "UNKNOWN"  # squeue gives no answer
ENDED = (
    *("BOOT_FAIL", "CANCELLED", "COMPLETED", "DEADLINE", "FAILED"),
    *("NODE_FAIL", "OUT_OF_MEMORY", "PREEMPTED", "REVOKED", "TIMEOUT"),
)
# How the names of the files begin by which tasks of a job over nodes say that they have begun, ended, or failed.
BEGUN, ENDED_BY_ITSELF, FAILED = "begun", "ended", "failed"
# For the batch script of a job over nodes. srun kills all tasks when it cannot start one, as on a node that has just
# come back, and when a node boots again: then no process of the run is there to queue the job again.
REQUEUE = """\
requeue_if_lost() {{
    local code=$? name=$SLURM_JOB_ID-${{SLURM_RESTART_COUNT:-0}}
    local begun=$(ls -d {folder}/begun-$name-* 2>/dev/null | wc -l)
    local tries=$(ls -d {folder}/lost-$SLURM_JOB_ID-* 2>/dev/null | wc -l)
    [ $begun -lt $SLURM_NNODES ] || [ ! -e {folder}/ended-$name-0 ] || return
    [ $code -ne 0 ] && [ $tries -lt {tries} ] || return
    scontrol show job $SLURM_JOB_ID | grep -q JobState=RUNNING || return
    touch {folder}/lost-$name
    echo "tasks of the run were lost ($begun of $SLURM_NNODES had begun): job $SLURM_JOB_ID is queued again" >&2
    scontrol requeue $SLURM_JOB_ID
}}
trap requeue_if_lost EXIT"""
WHY_UNKNOWN = (
    "`scontrol show job` has given no answer, so it is not known whether Slurm took its nodes for another job or "
    "somebody has cancelled it. To continue the run, submit the same command with ckpt.load_enable=true"
)
LOST_TRIES = 3  # how often a job is queued again because its tasks were lost without a word


@dataclass
class Command:
    """What a Slurm job runs: the command line of one run, in the process that submitit starts."""

    words: list[str]
    main: Main
    retries: int  # how often a job is queued again because a node was lost

    def __call__(self) -> None:
        """Run the command line. A job that was queued again continues its run.

        A run that Slurm asked to stop has saved its state before `main` returns. At the time limit and at a preemption,
        this function raises SIGUSR2 so that the handler of submitit queues the job again; that handler does not return.
        So it does when the run has lost a node, or Slurm ends it because the task of another node has ended, but not
        more often than `retries` says: submitit counts time limits only. A job that was cancelled ends without it.

        Raises:
            SystemExit: the run failed, and has said why. Slurm records the job as failed, with this exit code.
        """
        leave_trace(BEGUN)
        restarts = int(os.environ.get("SLURM_RESTART_COUNT", "0"))
        code = self.main([*self.words, *(["ckpt.load_enable=true"] if restarts > 0 and self.can_resume() else [])])
        was_told_to_end = code == 128 + signal.SIGTERM
        job = show_job() if was_told_to_end else {}
        leave_trace(ENDED_BY_ITSELF)
        if code in (1, 2):
            leave_trace(FAILED)
        has_lost_a_node = code == os.EX_TEMPFAIL or has_lost_a_task(job, count_traces(BEGUN), count_traces(FAILED))
        if has_lost_a_node and restarts >= self.retries:
            limit = f"{PREFIX}.max_num_timeout={self.retries}"
            say(f"The job is not queued again: Slurm has started it again {restarts} times already ({limit})")
        elif has_lost_a_node or code == 128 + signal.SIGUSR2 or is_preempted(job):
            signal.raise_signal(signal.SIGUSR2)
        elif was_told_to_end and not job:
            say(f"The job is not queued again: {WHY_UNKNOWN}")
        if code:  # below 0: that of the handler, if the signal came before the run could act upon it
            sys.exit(code)

    def can_resume(self) -> bool:
        """Return whether the task can continue from a saved state. A tool such as merge_lora starts again."""
        task = next((word.partition("=")[2] for word in self.words if word.startswith("task=")), None)
        return task in RESUMABLE

    def checkpoint(self) -> Any:
        """Return what submitit queues in place of a job that is stopped: the same command."""
        from submitit.helpers import DelayedSubmission

        return DelayedSubmission(self)


def submit(sweep: Sweep, jobs: list[Job], resources: dict[str, Any], main: Main) -> dict[str, Job]:
    """Submit the jobs as one array. Return them by their Slurm ids.

    Raises:
        UserError: Slurm is not here, or refuses the array.
    """
    import submitit

    if shutil.which("srun") is None:  # as submitit finds it
        problem = "hydra/launcher=slurm: nothing was submitted, because srun is not found: this machine has no Slurm"
        raise UserError(f"{problem}. Run the command on a login node of the cluster, or remove hydra/launcher=slurm")
    folder = sweep.folder / ".submitit" / "%j"
    resources = dict(resources)
    retries, python = resources.pop("max_num_timeout"), resources.pop("slurm_python", None)
    if resources.get("nodes", 1) > 1:  # the others would wait for a task that has ended
        resources["slurm_srun_args"] = ["--kill-on-bad-exit=1", *resources.get("slurm_srun_args", [])]
        place = shlex.quote(str(folder.parent.absolute()))
        requeue = REQUEUE.format(folder=place, tries=LOST_TRIES)
        resources["slurm_setup"] = [requeue, *resources.get("slurm_setup", [])]
    try:
        executor = submitit.AutoExecutor(
            folder=folder, cluster="slurm", slurm_max_num_timeout=retries, slurm_python=python
        )
        executor.update_parameters(**resources)
        with executor.batch():
            submitted = [executor.submit(Command(job.words, main, retries)) for job in jobs]
    except (RuntimeError, submitit.core.utils.FailedJobError) as error:
        raise UserError(f"hydra/launcher=slurm: nothing was submitted: {error}") from error
    for job, slurm in zip(jobs, submitted, strict=True):
        job.log, job.slurm = str(slurm.paths.stderr), slurm.job_id
        sweep.begin(job, f"submitted as {slurm.job_id}")
    return {slurm.job_id: job for job, slurm in zip(jobs, submitted, strict=True)}


def watch(
    sweep: Sweep, submitted: dict[str, Job], poll_s: float, states: Callable[[list[str]], dict[str, str]]
) -> None:
    """Wait for all jobs. A job is over when its run says that it is done and Slurm does not run it any more, or when
    Slurm has ended or forgotten it."""
    missing = dict.fromkeys(submitted, 0)
    answers = True
    while missing:
        now = states(list(missing))
        if answers != (answers := UNKNOWN not in now.values()):
            print("squeue answers again" if answers else "squeue does not answer; the sweep waits", flush=True)
        for number in list(missing):
            job = submitted[number]
            is_running = now.get(number) == "RUNNING"  # it writes its page after it has said that it is done
            is_done = not is_running and RunFolder(Path(job.folder)).status()["state"] == "done"
            gone = now.get(number, "COMPLETED") in ENDED
            missing[number] = missing[number] + 1 if gone else 0
            if is_done or missing[number] >= GONE_POLLS:
                del missing[number]
                sweep.end(job, "" if is_done else last_words(now.get(number), job))
        if missing:
            time.sleep(poll_s)


def last_words(state: str | None, job: Job) -> str:
    """Return the state in which Slurm left a job (None: it has forgotten it), and the last lines of its log."""
    tail = "\n".join(f"    {line}" for line in tail_lines(Path(job.log), 5))
    return f"Slurm job {job.slurm} {state or 'is gone'}\n{tail}"


def look(sweep: Sweep) -> None:
    """Take over the states that the jobs have now, also of those for whose end nobody waited. A job of Slurm is over
    when Slurm says so: a run that was stopped may be queued again, and one of another node cannot be asked."""
    numbers = [job.slurm for job in sweep.jobs if job.slurm]
    states = squeue(numbers) if numbers else {}
    for job in sweep.jobs:
        status, state = RunFolder(Path(job.folder)).status(), states.get(job.slurm)
        if status["state"] == "done" or not job.slurm or state == UNKNOWN:
            job.look(status)
        elif state is not None and state not in ENDED:
            job.state = f"{state.lower()} as {job.slurm}"
        else:
            job.end(status, last_words(state, job))


def say(text: str) -> None:
    """Print a line for the log of the job."""
    print(text, file=sys.stderr, flush=True)


def is_preempted(job: Mapping[str, str]) -> bool:
    """Return whether Slurm takes the nodes of this job for another job. When the job was cancelled, it does not."""
    return job.get("PreemptTime", "None") != "None"


def has_lost_a_task(job: Mapping[str, str], begun: int, failed: int) -> bool:
    """Return whether srun has sent SIGTERM because the task of another node was killed (`--kill-on-bad-exit`): the job
    goes on, which one that was cancelled or preempted does not.

    `begun` and `failed` are the numbers of its tasks that have begun, and that have ended by an error, which would come
    again. Of a job whose tasks have not all begun the batch script takes care.
    """
    goes_on = job.get("JobState") == "RUNNING" and not is_preempted(job)
    return goes_on and 1 < int(job["NumNodes"]) == begun and not failed


def leave_trace(kind: str) -> None:
    """Leave a file that says how this task is, if it is one of a job over nodes."""
    if (here := allocation()) is not None:
        (Path(os.environ["SUBMITIT_FOLDER"]).parent / f"{kind}-{here.tag}-{here.rank}").touch()


def count_traces(kind: str) -> int:
    """Return how many tasks of this job have left such a file."""
    if (here := allocation()) is None:
        return 0
    return len([*Path(os.environ["SUBMITIT_FOLDER"]).parent.glob(f"{kind}-{here.tag}-*")])


def squeue(numbers: list[str]) -> dict[str, str]:
    """Return the states of the jobs that Slurm remembers, by id; UNKNOWN for all of them if squeue gets no answer."""
    arrays = ",".join(sorted({number.split("_")[0] for number in numbers}))
    command = ["squeue", "--noheader", "--array", "--states=all", f"--jobs={arrays}", "--format=%i %T"]
    try:
        answer = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    except (OSError, subprocess.TimeoutExpired):  # there is no squeue here, or it hangs
        return dict.fromkeys(numbers, UNKNOWN)
    if answer.returncode and "Invalid job id" not in answer.stderr:
        return dict.fromkeys(numbers, UNKNOWN)
    return dict(line.split(maxsplit=1) for line in answer.stdout.splitlines())
