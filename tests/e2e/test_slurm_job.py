"""Jobs on a real Slurm: a time limit, a preemption and a lost node cost no step. Skipped without Slurm."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import jobs
import pytest
import slurm_cluster

from rlhf_suite.tracking.metrics import read_rows
from rlhf_suite.tracking.run_folder import RunFolder

pytestmark = pytest.mark.skipif(
    slurm_cluster.missing() is not None, reason=f"{slurm_cluster.missing()} is not installed: nox -s slurm"
)
DEADLINE_S = 300
STEPS = 40
WORDS = ["task=sft", "demo=sft", f"train.max_steps={STEPS}", "eval.steps=1000", "ckpt.save_steps=5"]


@pytest.fixture(scope="module")
def slurm(tmp_path_factory):
    with slurm_cluster.running_slurm(tmp_path_factory.mktemp("slurm")) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def undisturbed(runs):
    jobs.run(runs / "undisturbed", WORDS)
    return runs / "undisturbed"


class Submitted:
    """`python run.py -m hydra/launcher=slurm ...` as a process, and the Slurm job that it waits for."""

    def __init__(self, slurm: slurm_cluster.Slurm, folder: Path) -> None:
        self.slurm, self.folder = slurm, folder
        known = set(slurm.jobs())
        command = [sys.executable, str(jobs.ROOT / "run.py"), "-m", "hydra/launcher=slurm", *WORDS]
        command += [f"hydra.sweep.dir={folder}", "hydra.launcher.poll_s=0.5", "hydra.launcher.tasks_per_node=1"]
        self.launcher = subprocess.Popen(
            command, cwd=jobs.ROOT, env=slurm.environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        self.wait_for(lambda: set(slurm.jobs()) - known, "the submission")
        (self.id,) = set(slurm.jobs()) - known

    @property
    def run(self) -> RunFolder:
        return RunFolder(self.folder / "0")

    def wait_for(self, is_met, what: str) -> None:
        def met() -> bool:
            assert self.launcher.poll() is None, self.launcher.communicate()[0]
            return is_met()

        slurm_cluster.wait_for(met, what, DEADLINE_S)

    def wait_for_step(self, step: int) -> None:
        self.wait_for(lambda: any(row["step"] >= step for row in read_rows(self.run.metrics)), f"step {step}")

    def ended(self) -> str:
        said, _ = self.launcher.communicate(timeout=DEADLINE_S)
        assert self.launcher.returncode == 0, said
        return said


def test_a_time_limit_is_survived(slurm, undisturbed, runs):
    """Slurm sends SIGUSR2 before the limit; `scancel --signal` sends the same to the same processes."""
    job = Submitted(slurm, runs / "time_limit")
    job.wait_for_step(7)
    slurm.ask("scancel", "--signal=USR2", job.id)
    job.wait_for(lambda: job.run.status()["state"] == "stopped", "the end of the first part")
    step = job.run.status()["last_step"]
    assert job.run.status()["error"] == f"stopped by SIGUSR2; everything up to step {step} is saved"
    slurm.start_again_now(job.id)
    job.ended()
    assert jobs.digest(job.run.path) == jobs.digest(undisturbed)
    assert [row["step"] for row in read_rows(job.run.metrics)] == [*range(STEPS + 1), STEPS]  # evaluations


def test_a_preemption_is_survived(slurm, undisturbed, runs):
    """A job of a partition with more priority takes both nodes; the run gives them free as soon as it has saved."""
    job = Submitted(slurm, runs / "preempted")
    job.wait_for_step(7)
    other = slurm.ask(
        "sbatch", "--parsable", "--partition=high", "--nodes=2", "--exclusive", "--wrap=true", "-o/dev/null"
    )
    job.wait_for(lambda: job.run.status()["state"] == "stopped", "the end of the first part")
    job.wait_for(lambda: slurm.state(other) == "COMPLETED", "the other job")
    slurm.start_again_now(job.id)
    job.ended()
    assert jobs.digest(job.run.path) == jobs.digest(undisturbed)


def test_a_lost_node_is_survived(slurm, undisturbed, runs):
    """Slurm queues the job again by itself; it goes on from its last checkpoint, on the other node."""
    job = Submitted(slurm, runs / "lost_node")
    job.wait_for_step(7)
    (node,) = slurm.ask("squeue", "--noheader", f"--jobs={job.id}", "--format=%N").split()
    slurm.lose(node, job.run.status()["pid"])
    slurm.start_again_now(job.id)
    job.ended()
    assert jobs.digest(job.run.path) == jobs.digest(undisturbed)


def test_a_cancelled_job_saves_and_is_not_queued_again(slurm, runs):
    job = Submitted(slurm, runs / "cancelled")
    job.wait_for_step(7)
    slurm.ask("scancel", job.id)
    job.launcher.wait(DEADLINE_S)
    assert job.launcher.returncode == 1
    assert job.run.status()["state"] == "stopped"
    assert slurm.state(job.id) == "CANCELLED"
    assert list(job.run.checkpoints.iterdir())
