"""Runs over two real hosts, made of namespaces, with a real Slurm: what clusters do to a run, and what becomes of it.

Skipped without root and Slurm. `nox -s hosts` runs all of them and writes what they note into docs/slurm_measured.md.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

import hosts
import jobs
import pytest
import slurm_cluster

from rlhf_suite.run_folders.run_folder import RunFolder
from rlhf_suite.tracking.metrics import read_rows

pytestmark = [
    pytest.mark.proof,
    pytest.mark.timeout(1500),
    pytest.mark.skipif(hosts.missing() is not None, reason=hosts.missing() or ""),
]
DEADLINE_S = 600
INFINITE = float("inf")
# Ports that Ray gives its client server, its agent and its metrics wherever it runs.
FIXED = (":10001", ":52365", ":44217", ":44227")
FREE = ["nodea idle", "nodeb idle"]
STEPS = 120
# 128 rows a step: the demo's rows are trained on again and again, so that a run lasts as long as a test needs it.
SFT = [
    *("task=sft", "demo=sft", "train.batch_size=128", "eval.steps=1000", "actor.num_nodes=2", "ckpt.save_steps=10"),
    *("train.max_epochs=1000", f"train.max_steps={STEPS}"),
]
PPO = [*jobs.SMALL, "train.max_steps=4", "eval.steps=1000", "ckpt.save_steps=2", "vllm.num_engines=2"]
PPO_ON_BOTH = [*PPO, "actor.num_nodes=2", "ref.num_nodes=2", "train.colocate_actor_ref=true"]
# Policy and reference on one host, the engines where devices are left.
PPO_APART = [
    *(word for word in PPO if not word.startswith("vllm.")),
    *("actor.num_gpus_per_node=2", "ref.num_gpus_per_node=2", "train.colocate_actor_ref=true", "vllm.num_engines=3"),
]
NODE_B = r"node nodeb \(10\.99\.0\.2\) was lost"


@pytest.fixture(scope="module")
def cluster() -> Iterator[hosts.Hosts]:
    with hosts.running_hosts() as made:
        made.start_slurm()
        yield made


@pytest.fixture(scope="module")
def undisturbed(cluster: hosts.Hosts) -> str:
    """The digest of the weights of a run that nothing has disturbed."""
    job = SlurmJob(cluster, "undisturbed", SFT)
    job.ended()
    return jobs.digest(job.run.path)


@pytest.fixture
def note(record_property):
    """Note a row of the table: what happens and what came of it; the seconds since this fixture began."""
    began = time.monotonic()

    def noted(scenario: str, outcome: str) -> None:
        for name, value in {
            "scenario": scenario,
            "outcome": outcome,
            "seconds": round(time.monotonic() - began),
        }.items():
            record_property(name, value)

    return noted


class Command:
    """A command on a host; what it prints is in a file."""

    def __init__(self, cluster: hosts.Hosts, host: str, name: str, words: list[str]) -> None:
        self.cluster, self.run = cluster, RunFolder(cluster.folder / name)
        self.said = cluster.folder / f"{name}.out"
        with self.said.open("wb") as out:
            command = cluster.command(
                host, [sys.executable, str(jobs.ROOT / "run.py"), *words, f"run_dir={self.run.path}"]
            )
            self.process = subprocess.Popen(command, cwd=jobs.ROOT, stdout=out, stderr=out, stdin=subprocess.DEVNULL)

    def text(self) -> str:
        """What was printed, and what the tasks of the job have printed."""
        logs = sorted(self.run.path.glob(".submitit/*/*_log.*"))
        return "\n".join(f"== {file.name}\n{file.read_text()}" for file in [self.said, *logs])

    def wait_for(self, is_met, activity: str) -> None:
        def met() -> bool:
            assert self.process.poll() is None, self.text()
            return is_met()

        slurm_cluster.wait_for(met, activity, DEADLINE_S)

    def wait_for_step(self, step: int) -> None:
        self.wait_for(lambda: any(row["step"] >= step for row in read_rows(self.run.metrics)), f"step {step}")

    def wait_for_state(self, state: str) -> str:
        """Wait for a state of the run; return why it is so."""
        self.wait_for(lambda: self.run.status()["state"] == state, f"the state {state}")
        return str(self.run.status()["error"])

    def places(self) -> dict[str, str]:
        """The hosts of the actors, by their names, which the logs begin with."""
        first = re.compile(r"(\S+) is process \d+ on (\S+) \(")
        return dict(first.match(log.read_text()).groups() for log in self.run.logs.glob("*-*.log"))

    def ended(self, code: int = 0) -> str:
        assert self.process.wait(DEADLINE_S) == code, self.text()
        return self.text()


class SlurmJob(Command):
    """A run that is a Slurm job of the two nodes, submitted on `a`."""

    def __init__(self, cluster: hosts.Hosts, name: str, words: list[str]) -> None:
        known = set(cluster.jobs())
        launcher = ["hydra/launcher=slurm", "hydra.launcher.nodes=2", "hydra.launcher.poll_s=1"]
        words = [*launcher, "hydra.launcher.cpus_per_task=2", *words]
        super().__init__(cluster, "a", name, words)
        self.wait_for(lambda: set(cluster.jobs()) - known, "the submission")
        (self.id,) = set(cluster.jobs()) - known

    def start_again_now(self) -> None:
        """Slurm makes a job that is queued again wait for two minutes; this one need not, once both nodes are free and
        have forgotten its first start."""
        self.wait_for(lambda: self.cluster.jobs()[self.id] == "PENDING", f"the requeue of {self.id}")
        self.wait_for(lambda: self.cluster.nodes() == FREE, "the nodes to be free")
        self.cluster.ask("a", "scontrol", "update", f"JobId={self.id}", "StartTime=now+10")

    def start_again_when_free(self) -> None:
        """Start the job again whenever it waits and both nodes are free, until the launcher has ended."""
        started = -INFINITE
        while self.process.poll() is None:
            is_free = self.cluster.nodes() == FREE and self.cluster.jobs()[self.id] == "PENDING"
            if is_free and time.monotonic() - started > 60:
                started = time.monotonic()
                self.cluster.ask("a", "scontrol", "update", f"JobId={self.id}", "StartTime=now+10")
            time.sleep(1)


def check_syncs(job: Command) -> None:
    """Every step is there, and the engines held after every sync what the trainer has sent."""
    rows = jobs.train_rows(job.run.path)
    assert rows and [row["step"] for row in rows] == [*range(1, len(rows) + 1)]
    syncs = [row for row in rows if "sync/tensors" in row]
    assert syncs and all(row["sync/read_back"] == row["sync/tensors"] > 0 for row in syncs)


@contextmanager
def ray_by_hand(cluster: hosts.Hosts, cpus: int = 2) -> Iterator[str]:
    """The recipe of docs/slurm.md on both hosts, with its token; yields the address of the cluster."""
    start = ["ray", "start", f"--num-cpus={cpus}", f"--object-store-memory={300 << 20}", "--disable-usage-stats"]
    before = dict(cluster.environment)
    path = cluster.folder / "ray_token"
    cluster.environment |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(path)}
    cluster.environment["PATH"] = f"{jobs.ROOT / '.venv' / 'bin'}:{before['PATH']}"
    try:
        path.touch(mode=0o600)
        path.write_text("a1" * 32)
        cluster.ask("a", *start, "--head", "--port=6379", f"--node-ip-address={cluster.address('a')}")
        cluster.ask("b", *start, f"--address={cluster.address('a')}:6379")
        yield f"{cluster.address('a')}:6379"
    finally:
        for host in "ab":
            cluster.ask(host, "ray", "stop", "--force")
        cluster.environment = before


def test_sft_runs_over_two_hosts_with_debians_list_of_hosts(cluster, note):
    """Each host has 127.0.1.1 for its own name, as Debian's installer writes it."""
    for host in "ab":
        cluster.write_names(host, as_debian=True)
    try:
        job = SlurmJob(cluster, "debian", [*SFT, "train.max_steps=4", "launch.timeout_s=120"])
        said = job.ended()
    finally:
        for host in "ab":
            cluster.write_names(host)
    assert job.run.status()["state"] == "done", said
    note("SFT, a rank on each host, Debian's /etc/hosts", "done")


def test_an_outage_of_75_seconds_is_survived(cluster, undisturbed, note):
    """Slurm gives a silent node 300 s. Ray gives it 60 s, so the run ends first; it is queued again."""
    job = SlurmJob(cluster, "outage", SFT)
    job.wait_for_step(15)
    began = time.monotonic()
    cluster.partition("b")
    try:
        why = job.wait_for_state("stopped")
        stopped_s = time.monotonic() - began
        time.sleep(max(0.0, 75 - stopped_s))  # the outage itself
    finally:
        cluster.heal("b")
    assert re.match(NODE_B, why), why
    assert "continue after step" in why
    job.start_again_now()
    job.ended()
    assert jobs.digest(job.run.path) == undisturbed
    note(
        "SFT, no network for 75 s, SlurmdTimeout=300",
        f"stopped after {stopped_s:.0f} s, names node b; queued again, equal weights",
    )


def test_other_nodes_wait_for_a_first_one_that_is_late(cluster, note):
    """Its Python starts 125 s late; the others once gave it 120 s."""
    python = cluster.folder / "late_python"
    python.write_text(f'#!/bin/sh\n[ "$SLURM_PROCID" = 0 ] && sleep 125\nexec {sys.executable} "$@"\n')
    python.chmod(0o755)
    job = SlurmJob(cluster, "late", [*SFT, "train.max_steps=4", f"hydra.launcher.slurm_python={python}"])
    job.ended()
    assert job.run.status()["state"] == "done"
    note("SFT, the first node is 125 s late", "done")


def test_a_preemption_is_survived(cluster, undisturbed, note):
    job = SlurmJob(cluster, "preempted", SFT)
    job.wait_for_step(15)
    other = ("sbatch", "--parsable", "--partition=high", "--nodes=2", "--exclusive", "--wrap=true", "-o/dev/null")
    number = cluster.ask("a", *other)
    job.wait_for_state("stopped")
    step = job.run.status()["last_step"]
    job.wait_for(lambda: cluster.jobs()[number] == "COMPLETED", "the other job")
    job.start_again_now()
    job.ended()
    assert jobs.digest(job.run.path) == undisturbed
    note("SFT, a preemption of both nodes", f"saved step {step}, queued again, equal weights")


def test_a_lost_node_is_survived(cluster, undisturbed, note):
    """All of b is gone at once, and Slurm would notice after 300 s. It comes back when the run has stopped."""
    job = SlurmJob(cluster, "lost", SFT)
    job.wait_for_step(15)
    began = time.monotonic()
    cluster.partition("b")
    cluster.kill("b")
    why = job.wait_for_state("stopped")
    stopped_s = time.monotonic() - began
    assert re.match(NODE_B, why), why
    cluster.boot("b")
    cluster.heal("b")
    cluster.start_slurmd("b")
    job.start_again_now()
    job.ended()
    assert jobs.digest(job.run.path) == undisturbed
    outcome = f"stopped after {stopped_s:.0f} s, names node b; queued again, equal weights"
    note("SFT, a node is switched off, SlurmdTimeout=300", outcome)


def test_ppo_runs_over_two_hosts_by_slurm(cluster, note):
    job = SlurmJob(cluster, "ppo_slurm", PPO_ON_BOTH)
    job.ended()
    places = job.places()
    assert {places["actor-0"], places["actor-1"]} == {"nodea", "nodeb"}
    assert {places["engine-0"], places["engine-1"]} <= {"nodea", "nodeb"}
    check_syncs(job)
    for host in "ab":  # temporary files of actors are in the folder of the run's session, which is gone
        assert cluster.ask(host, "ls", "/tmp") in ("", "torchinductor_root")  # torch's empty cache of the driver
    note("PPO, policy ranks on both hosts, by Slurm", "done, every sync attested")


@pytest.mark.parametrize(("driver", "words"), [("a", PPO_APART), ("b", PPO_ON_BOTH)], ids=["from a", "from b"])
def test_ppo_runs_over_a_cluster_of_ray_in_both_directions(cluster, note, driver, words):
    with ray_by_hand(cluster, cpus=1 if driver == "a" else 2) as address:
        job = Command(cluster, driver, f"ppo_{driver}", [*words, f"launch.ray_address={address}"])
        said = job.ended()
    assert "asks for no token" not in said
    assert job.run.status()["host"] == f"node{driver}"
    check_syncs(job)
    places = sorted(f"{name} on {host}" for name, host in job.places().items() if not name.startswith("reward"))
    note(f"PPO, Ray by hand with a token, driver on {driver}", f"done, every sync attested: {', '.join(places)}")


def test_sft_runs_over_a_cluster_of_ray_with_its_driver_on_the_other_host(cluster, note):
    with ray_by_hand(cluster) as address:
        words = [*SFT, "train.max_steps=4", f"launch.ray_address={address.replace(cluster.address('a'), 'nodea')}"]
        job = Command(cluster, "b", "sft_b", words)
        job.ended()
    places = job.places()
    assert {places["actor-0"], places["actor-1"]} == {"nodea", "nodeb"}
    note("SFT, Ray by hand with a token, driver on b", "done, a rank on each host")


def test_small_packets_change_nothing(cluster, note):
    cluster.limit_packets(576)
    try:
        job = SlurmJob(cluster, "packets", PPO_ON_BOTH)
        job.ended()
    finally:
        cluster.limit_packets(1500)
    check_syncs(job)
    note("PPO, packets of at most 576 bytes", "done, every sync attested")


def test_a_partition_that_heals_late_is_survived(cluster, undisturbed, note):
    """Slurm has given the node up (SlurmdTimeout=30), and starts the job again at the moment of the return, when the
    node may lose its task."""
    cluster.set_slurm_timeout(30)
    try:
        job = SlurmJob(cluster, "healed", SFT)
        job.wait_for_step(15)
        cluster.partition("b")
        try:
            job.wait_for(lambda: cluster.jobs()[job.id] == "PENDING", "Slurm to give the node up")
            cluster.ask("a", "scontrol", "update", f"JobId={job.id}", "StartTime=now")
        finally:
            cluster.heal("b")
        job.start_again_when_free()
        job.ended()
    finally:
        cluster.set_slurm_timeout(300)
    assert jobs.digest(job.run.path) == undisturbed
    lost = len(list(job.run.path.glob(".submitit/lost-*")))
    outcome = f"queued again by Slurm, equal weights; starts that the returning node spoilt: {lost}"
    note("SFT, no network until Slurm has given the node up, SlurmdTimeout=30", outcome)


def test_an_uninvited_host_gets_no_answer(cluster, note):
    """Host c tries every port of a and b during a run over both, as a browser and as a client of Ray, with no token."""
    job = SlurmJob(cluster, "visited", [*PPO_ON_BOTH, "train.max_steps=100000", "train.num_episodes=100000"])
    job.wait_for_step(1)
    addresses = [f"{cluster.address(host)}:{port}" for host in "ab" for port in cluster.listeners(host)]
    assert not [place for place in addresses if place.endswith(FIXED)], "another run could not share the node"
    (head,) = (json.loads(file.read_text())["address"] for file in job.run.path.glob("ray_*-0.json"))
    script = jobs.ROOT / "tests" / "e2e" / "stranger.py"
    said = cluster.ask("c", sys.executable, str(script), head, *addresses, limit_s=300).splitlines()
    step = max(row["step"] for row in jobs.train_rows(job.run.path))
    job.wait_for_step(step + 2)
    cluster.ask("a", "scancel", job.id)
    job.ended(1)
    assert [line for line in said if " 200 " in line] == [], said
    assert [line for line in said if line.startswith("ray.init: ")] == ["ray.init: ConnectionError"], said
    outcome = (
        f"{len(addresses)} ports accept connections, none answers a request; `ray.init` is refused; the run goes on"
    )
    note("PPO, host c tries all ports without a token", outcome)
