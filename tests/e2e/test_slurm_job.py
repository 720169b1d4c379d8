"""Jobs on a real Slurm of two nodes: sweeps, single runs, and runs that are stopped, killed or lose their node. Skipped
without Slurm. `nox -s slurm` runs all of them, `nox -s tests` only the short ones. What a test notes,
`benchmarks/slurm.py` writes into docs/slurm_measured.md."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

import jobs
import psutil
import pytest
import slurm_cluster

from actor_processes import process_of
from rlhf_suite.run_folders.run_folder import RunFolder
from rlhf_suite.tracking.metrics import read_rows

sys.path.insert(0, str(jobs.ROOT / "benchmarks"))

import stream_books

pytestmark = [
    pytest.mark.timeout(2000),
    pytest.mark.skipif(
        slurm_cluster.missing() is not None, reason=f"{slurm_cluster.missing()} is not installed: nox -s slurm"
    ),
]
DEADLINE_S = 900
STEPS = 40
SFT = ["task=sft", "demo=sft", "eval.steps=1000"]
WORDS = [*SFT, f"train.max_steps={STEPS}", "ckpt.save_steps=5"]
ARRAY = ["actor.adam.lr=0.001,0.002,1e30", f"train.max_steps={STEPS}", "ckpt.save_steps=5"]
STREAM = [
    *(word for word in jobs.SMALL if not word.startswith("data.")),
    *jobs.STREAM,
    f"data.max_samples={stream_books.ROWS}",
    *(f"train.max_steps={stream_books.STEPS}", f"eval.steps={stream_books.STEPS}", "ckpt.save_steps=2"),
    *("algo.advantage.estimator=rloo", "algo.dynamic_filtering_enable=true", "correction=tis"),
    *("train.async_enable=true", "train.async_queue_size=3"),
]
TWO_NODES = [
    *jobs.SMALL,
    *("actor.num_nodes=2", "ref.num_nodes=2", "train.max_steps=2", "eval.steps=1000", "launch.num_cpus=2"),
]


@pytest.fixture(scope="module")
def folders(runs):
    """Where the runs of these tests are; other tests of the session have runs of the same names."""
    folder = runs / "slurm"
    folder.mkdir()
    return folder


@pytest.fixture(scope="module")
def slurm(tmp_path_factory):
    with slurm_cluster.running_slurm(tmp_path_factory.mktemp("slurm")) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def undisturbed(folders):
    jobs.run(folders / "undisturbed", WORDS)
    return folders / "undisturbed"


@pytest.fixture
def note(record_property):
    """Note a row of the table: what happens, the command, and what came of it; the seconds since this fixture began."""
    began = time.monotonic()

    def noted(scenario: str, command: str, outcome: str) -> None:
        row = {"scenario": scenario, "command": command, "outcome": outcome}
        for name, value in (row | {"seconds": round(time.monotonic() - began)}).items():
            record_property(name, value)

    return noted


class Submitted:
    """`python run.py hydra/launcher=slurm ...` as a process, and the Slurm job or array that it waits for."""

    def __init__(self, slurm: slurm_cluster.Slurm, folder: Path, words: list[str]) -> None:
        self.slurm, self.folder = slurm, folder
        self.codes = (None, 0) if "hydra.launcher.wait=false" in words else (None,)  # of the launcher while we wait
        known = set(slurm.jobs())
        command = [sys.executable, str(jobs.ROOT / "run.py"), "hydra/launcher=slurm", *words]
        self.launcher = subprocess.Popen(
            [*command, f"run_dir={folder}", "hydra.launcher.poll_s=3"],
            cwd=jobs.ROOT,
            env=slurm.environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        self.wait_for(lambda: set(slurm.jobs()) - known, "the submission")
        (self.id,) = {name.partition("_")[0] for name in set(slurm.jobs()) - known}

    @property
    def run(self) -> RunFolder:
        """A single run."""
        return RunFolder(self.folder)

    def job(self, number: int) -> RunFolder:
        """A job of a sweep."""
        return RunFolder(self.folder / str(number))

    def wait_for(self, is_met, what: str) -> None:
        def met() -> bool:
            assert self.launcher.poll() in self.codes, self.launcher.communicate()[0]
            return is_met()

        slurm_cluster.wait_for(met, what, DEADLINE_S)

    def wait_for_step(self, step: int, run: RunFolder | None = None) -> None:
        metrics = (run or self.run).metrics
        self.wait_for(lambda: any(row["step"] >= step for row in read_rows(metrics)), f"step {step}")

    def wait_for_stop(self) -> int:
        """Wait until the run has saved because it was asked to end; return its last step."""
        self.wait_for(lambda: self.run.status()["state"] == "stopped", "the end of the first part")
        step = self.run.status()["last_step"]
        assert self.run.status()["error"].endswith(f"; everything up to step {step} is saved")
        return int(step)

    def lose_node(self) -> str:
        """Kill the node that the run is on."""
        (node,) = self.slurm.ask("squeue", "--noheader", f"--jobs={self.id}", "--format=%N").split()
        self.slurm.lose(node, self.run.status()["pid"])
        return node

    def ended(self, code: int = 0) -> str:
        said, _ = self.launcher.communicate(timeout=DEADLINE_S)
        assert self.launcher.returncode == code, f"{said}\nsqueue: {self.slurm.jobs()}"
        return said


def status_of(slurm: slurm_cluster.Slurm, folder: Path) -> tuple[int, list[str]]:
    """The exit code of `rlhf-suite sweep status <folder>`, and the states of the jobs that it found."""
    command = [sys.executable, "-m", "rlhf_suite.cli", "sweep", "status", str(folder)]
    code = subprocess.run(command, env=slurm.environment, capture_output=True, timeout=120, check=False).returncode
    return code, [row["state"] for row in json.loads((folder / "summary.json").read_text())]


def ray_node(log: Path) -> int:
    """The process of the Ray node whose actor writes to `log`."""
    actor = process_of(log, psutil.process_iter())
    return next(each.pid for each in actor.parents() if each.name() == "raylet")


@pytest.mark.proof
def test_a_time_limit_is_survived(slurm, undisturbed, folders, note):
    """Slurm sends SIGUSR2 before the limit; `scancel --signal` sends the same to the same processes."""
    job = Submitted(slurm, folders / "time_limit", WORDS)
    job.wait_for_step(7)
    slurm.ask("scancel", "--signal=USR2", job.id)
    step = job.wait_for_stop()
    slurm.start_again_now(job.id)
    job.ended()
    assert jobs.digest(job.folder) == jobs.digest(undisturbed)
    assert [row["step"] for row in read_rows(job.run.metrics)] == [*range(STEPS + 1), STEPS]  # evaluations
    note("the signal of a time limit", "`scancel --signal=USR2`", f"saved step {step}, queued again, equal weights")


@pytest.mark.proof
def test_a_real_time_limit_is_survived(slurm, folders, note):
    """Slurm sends the signal up to a minute earlier than it was asked to."""
    endless = ["train.max_epochs=1000000", "train.max_steps=10000000"]
    limit = ["hydra.launcher.timeout_min=4", "hydra.launcher.slurm_signal_delay_s=60"]
    job = Submitted(slurm, folders / "real_limit", [*SFT, *endless, *limit])
    step = job.wait_for_stop()
    slurm.start_again_now(job.id)
    job.wait_for_step(step + 1)
    assert job.run.status()["resumes"][0]["step"] == step
    slurm.ask("scancel", job.id)
    job.ended(1)
    note(
        "a time limit of 4 min", "`hydra.launcher.timeout_min=4`", f"saved step {step}, queued again, goes on after it"
    )


@pytest.mark.proof
def test_a_preemption_is_survived(slurm, undisturbed, folders, note):
    """A job of a partition with more priority takes both nodes; the run gives them free as soon as it has saved."""
    job = Submitted(slurm, folders / "preempted", WORDS)
    job.wait_for_step(7)
    other = slurm.ask(
        "sbatch", "--parsable", "--partition=high", "--nodes=2", "--exclusive", "--wrap=true", "-o/dev/null"
    )
    step = job.wait_for_stop()
    job.wait_for(lambda: slurm.state(other) == "COMPLETED", "the other job")
    slurm.start_again_now(job.id)
    job.ended()
    assert jobs.digest(job.folder) == jobs.digest(undisturbed)
    note("a preemption", "`sbatch --partition=high --nodes=2`", f"saved step {step}, queued again, equal weights")


@pytest.mark.proof
def test_a_lost_node_is_survived(slurm, undisturbed, folders, note):
    """Slurm queues the job again by itself; it goes on from its last checkpoint, on the other node."""
    job = Submitted(slurm, folders / "lost_node", WORDS)
    job.wait_for_step(7)
    node = job.lose_node()
    slurm.start_again_now(job.id)
    job.ended()
    slurm.revive(node)
    assert jobs.digest(job.folder) == jobs.digest(undisturbed)
    note(
        "a lost node",
        "`kill -9` of slurmd and the run",
        "queued again by Slurm, from the last checkpoint, equal weights",
    )


@pytest.mark.proof
def test_a_cancelled_job_saves_and_is_not_queued_again(slurm, folders, note):
    job = Submitted(slurm, folders / "cancelled", WORDS)
    job.wait_for_step(7)
    slurm.ask("scancel", job.id)
    job.ended(1)
    assert job.run.status()["state"] == "stopped"
    assert slurm.state(job.id) == "CANCELLED"
    assert list(job.run.checkpoints.iterdir())
    note("`scancel`", "`scancel <job>`", f"saved step {job.run.status()['last_step']}, stays cancelled, exit code 1")


@pytest.mark.proof
def test_a_sweep_is_an_array_with_a_limit_whose_jobs_end_alone(slurm, folders, note):
    """Two of three jobs run at a time. One ends well, one is killed, and one diverges; afterwards only the killed and
    the failed one start again."""
    words = ["-m", *SFT, *ARRAY, "hydra.launcher.slurm_array_parallelism=2"]
    sweep = Submitted(slurm, folders / "array", words)
    sweep.wait_for_step(6, sweep.job(1))
    assert "ArrayTaskThrottle=2" in slurm.ask("scontrol", "--oneliner", "show", "job", sweep.id)
    psutil.Process(sweep.job(1).status()["pid"]).kill()
    said = sweep.ended(1)
    states = [row["state"] for row in json.loads((sweep.folder / "summary.json").read_text())]
    assert states == ["done", "failed", "failed"]
    assert f"#1 failed: Slurm job {sweep.id}_1 FAILED" in said
    assert "#2 failed: RunError" in said and "not finite" in said
    assert (sweep.folder / "0" / "model").exists()
    again = Submitted(slurm, sweep.folder, [*words, "ckpt.load_enable=true"])
    said = again.ended(1)
    assert "#0 is done already" in said
    assert again.job(1).status()["resumes"][0]["step"] == 5
    assert [again.job(number).status()["state"] for number in range(3)] == ["done", "done", "failed"]
    outcome = "two jobs at a time; the killed and the diverged one fail alone; the same command again runs these two"
    note("a sweep of three jobs, one killed, one diverged", "`-m hydra.launcher.slurm_array_parallelism=2`", outcome)


def test_a_sweep_that_nobody_waits_for_is_asked_later(slurm, folders, note):
    words = ["-m", *SFT, "train.seed=1,2", "train.max_steps=2", "hydra.launcher.wait=false"]
    sweep = Submitted(slurm, folders / "unwatched", [*words, "hydra.launcher.slurm_additional_parameters.hold=true"])
    sweep.ended()
    assert status_of(slurm, sweep.folder) == (0, [f"pending as {sweep.id}_{number}" for number in range(2)])
    slurm.ask("scancel", f"{sweep.id}_1")
    slurm.ask("scontrol", "release", sweep.id)
    sweep.wait_for(lambda: sweep.job(0).status()["state"] == "done", "the end of job 0")
    assert status_of(slurm, sweep.folder) == (1, ["done", "failed"])
    assert json.loads((sweep.folder / "summary.json").read_text())[1]["error"] == f"Slurm job {sweep.id}_1 is gone\n"
    outcome = "returns at once; `rlhf-suite sweep status` says pending, then done, and of a cancelled job failed"
    note("a sweep that nobody waits for", "`-m hydra.launcher.wait=false`", outcome)


def test_a_single_run_is_a_job_of_its_site(slurm, folders, tmp_path, note):
    """Its Python, which may be that of a container, tells what the lines of the set-up and srun have given it."""
    python, told = tmp_path / "python", tmp_path / "told"
    python.write_text(f'#!/bin/sh\necho "$SITE $SRUN" >> {told}\nexec {sys.executable} "$@"\n')
    python.chmod(0o755)
    site = ["slurm_partition=high", "slurm_account=physics", "slurm_constraint=large", f"slurm_python={python}"]
    site += ['slurm_setup=["export SITE=here"]', 'slurm_srun_args=["--export=ALL,SRUN=too"]', "cpus_per_task=2"]
    words = [*SFT, "train.max_steps=2", *(f"hydra.launcher.{each}" for each in site)]
    job = Submitted(slurm, folders / "single", words)
    said = slurm.ask("scontrol", "--oneliner", "show", "job", job.id)
    job.ended()
    for each in ("Partition=high", "Account=physics", "Features=large", "CPUs/Task=2"):
        assert each in said.split()
    assert told.read_text().split() == ["here", "too"]
    assert job.run.status()["state"] == "done"
    assert (job.folder / "report.html").exists() and not (job.folder / "0").exists()
    assert status_of(slurm, job.folder) == (0, ["done"])
    outcome = "one job in the run's own folder, on a node with the feature, by the site's Python"
    note("a single run", "`hydra/launcher=slurm` without `-m`", outcome)


@pytest.mark.proof
def test_a_stream_of_rollouts_survives_a_signal_and_a_lost_node(slurm, folders, warm, note):
    """Responses are being written whenever the run is stopped: each group is trained on once, or it is outstanding."""
    job = Submitted(slurm, folders / "stream", [*STREAM, f"actor.model_name_or_path={warm}"])
    job.wait_for_step(3)
    slurm.ask("scancel", "--signal=USR2", job.id)
    step = job.wait_for_stop()
    assert stream_books.faults(job.folder) == []
    slurm.start_again_now(job.id)
    job.wait_for_step(step + 2)
    node = job.lose_node()
    slurm.start_again_now(job.id)
    job.ended()
    slurm.revive(node)
    assert stream_books.faults(job.folder) == []
    assert job.run.status()["resumes"][0]["step"] == step
    outcome = f"saved step {step}; queued again twice; each group of samples is trained on once"
    note("a stream of rollouts: the signal, then a lost node", "`train.partial_rollout_enable=true`", outcome)


@pytest.mark.proof
def test_a_run_of_two_nodes_has_ranks_on_both(slurm, folders, warm, note):
    words = [*TWO_NODES, f"actor.model_name_or_path={warm}", "hydra.launcher.nodes=2"]
    job = Submitted(slurm, folders / "two_nodes", words)
    job.wait_for_step(1)
    nodes = {ray_node(job.run.logs / f"actor-{rank}.log") for rank in range(2)}
    allocated = slurm.ask("squeue", "--noheader", f"--jobs={job.id}", "--format=%N")
    job.ended()
    assert allocated == "n[1-2]"
    assert len(nodes) == 2
    assert len(jobs.train_rows(job.folder)) == 2
    assert not list(job.folder.glob("ray_*.token"))
    note(
        "PPO on two nodes",
        "`hydra.launcher.nodes=2 actor.num_nodes=2`",
        "one Ray over both, a rank of the policy on each",
    )
