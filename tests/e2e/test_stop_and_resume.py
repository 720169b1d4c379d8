"""SIGTERM, as `timeout`, `docker stop` and Slurm send it: the step is finished and saved, a resume loses nothing."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys

import jobs
import psutil
import pytest

from rlhf_suite.polling import poll_until
from rlhf_suite.run_folders.run_folder import RunFolder

SFT = ["task=sft", "demo=sft", "train.max_steps=30", "eval.steps=1000"]
LOOP = [
    "task=rejection_sampling",
    "loop.num_iterations=1",
    "data.max_samples=64",
    "eval.dataset=null",
    "train.batch_size=2",
    "train.micro_batch_size=2",
]
GONE_S = 20.0


def stopped(folder, words, is_under_way):
    """Stop a run with SIGTERM for all of its processes at once; returns how it ended and who was there."""
    job = jobs.Job(folder, words)
    job.wait_for(lambda: is_under_way(job))
    family = job.family()
    for process in family:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.send_signal(signal.SIGTERM)
    return job.ended(), family


def without_retries(folder):
    """What every training step measured, but for the retries: the signal ends a reward process, and it is restarted."""
    rows = jobs.timeless(jobs.train_rows(folder))
    return [{name: value for name, value in row.items() if name != "reward/retries"} for row in rows]


@pytest.fixture(scope="module")
def stopped_sft(runs):
    return stopped(runs / "stopped_sft", SFT, lambda job: job.folder.status()["last_step"] >= 3)


def test_an_sft_run_saves_its_step_and_ends_with_the_code_of_the_signal(stopped_sft, runs):
    ended, status = stopped_sft[0], RunFolder(runs / "stopped_sft").status()
    assert ended.code == 128 + signal.SIGTERM
    step = status["last_step"]
    assert status["state"] == "stopped"
    assert status["error"] == f"stopped by SIGTERM; everything up to step {step} is saved"
    assert f"continue after step {step} with the same command and ckpt.load_enable=true" in ended.err
    assert [path.name for path in (runs / "stopped_sft" / "checkpoints").iterdir()] == [f"step_{step:06d}"]


def test_a_stopped_sft_run_ends_in_the_weights_of_an_undisturbed_one(stopped_sft, runs):
    jobs.run(runs / "undisturbed_sft", SFT)
    jobs.run(runs / "stopped_sft", [*SFT, "ckpt.load_enable=true"])
    assert jobs.digest(runs / "stopped_sft") == jobs.digest(runs / "undisturbed_sft")


@pytest.mark.proof
def test_a_stopped_ppo_run_ends_in_the_weights_of_an_undisturbed_one(baseline, baseline_words, runs):
    """Ray's daemons and actors do not act upon the signal, so the driver can finish its step with them."""
    folder = runs / "stopped_ppo"
    ended, family = stopped(folder, baseline_words, lambda job: len(jobs.train_rows(job.folder.path)) >= 1)
    assert ended.code == 128 + signal.SIGTERM, ended.err
    assert RunFolder(folder).status()["state"] == "stopped"
    assert jobs.survivors(family, GONE_S) == []
    jobs.run(folder, [*baseline_words, "ckpt.load_enable=true"])
    assert jobs.digest(folder) == jobs.digest(baseline)
    assert without_retries(folder) == without_retries(baseline)


def test_a_run_that_is_stopped_during_its_start_ends_cleanly(runs, baseline_words):
    folder = runs / "stopped_start"
    has_daemons = lambda job: any("raylet" in process.name() for process in job.family())  # noqa: E731
    ended, family = stopped(folder, baseline_words, has_daemons)
    assert ended.code == 128 + signal.SIGTERM, ended.err
    assert RunFolder(folder).status()["state"] == "stopped"
    assert "Traceback" not in ended.err
    assert jobs.survivors(family, GONE_S) == []


def closed_terminal(words, has_begun):
    """Start a command on a terminal of its own, and close the terminal once `has_begun`; return the exit code."""
    other, console = os.openpty()
    process = subprocess.Popen(
        ["setsid", "--ctty", sys.executable, str(jobs.ROOT / "run.py"), *words],
        cwd=jobs.ROOT,
        stdin=console,
        stdout=console,
        stderr=console,
    )
    os.close(console)
    os.set_blocking(other, False)

    def has_ended_or_begun():
        with contextlib.suppress(OSError):  # nothing to read now, or nothing any more
            while os.read(other, 65536):
                pass
        return process.poll() is not None or has_begun()

    assert poll_until(has_ended_or_begun, jobs.DEADLINE_S)
    os.close(other)
    return process.wait(jobs.DEADLINE_S)


@pytest.mark.parametrize("kind", ["run", "sweep", pytest.param("loop", marks=pytest.mark.proof)])
def test_what_runs_on_a_terminal_that_is_closed_saves_its_step(runs, kind):
    """The kernel sends SIGHUP to what was started there, and each line that is written to the terminal is an error. A
    sweep asks its jobs to end with SIGTERM; a loop passes its signal on."""
    folder = runs / f"closed_{kind}"
    words, place = {
        "run": ([*SFT, f"run_dir={folder}"], "."),
        "sweep": (["-m", *SFT, "train.seed=1", f"hydra.sweep.dir={folder}"], "0"),
        "loop": ([*LOOP, f"run_dir={folder}"], "iter_0/sft"),
    }[kind]
    run = RunFolder(folder / place)
    code = closed_terminal(words, lambda: run.status()["last_step"] >= 3)
    status = run.status()
    assert (code, status["state"]) == (128 + signal.SIGHUP, "stopped"), status
    step, signal_name = status["last_step"], "SIGTERM" if kind == "sweep" else "SIGHUP"
    assert status["error"] == f"stopped by {signal_name}; everything up to step {step} is saved"
    assert [path.name for path in run.checkpoints.iterdir()] == [f"step_{step:06d}"]
