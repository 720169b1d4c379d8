"""Start one Ray cluster over the nodes of a Slurm job, whose tasks all run the same program, one task per node.

The first task starts the head node of Ray and continues with the run. The other tasks join their nodes to the cluster
until the run ends. The tasks communicate through two small files in the run folder, which must be on a file system that
all nodes share: the address of the head, and a file that says that the run has ended.
"""

from __future__ import annotations

import json
import os
import secrets
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from rlhf_suite.config.launch import LaunchConfig
from rlhf_suite.disk import write_json, write_text
from rlhf_suite.errors import RunError
from rlhf_suite.launch.environment import cpu_count
from rlhf_suite.launch.session import session
from rlhf_suite.launch.stop import block_signals, defer_signals
from rlhf_suite.polling import poll_until

POLL_S = 0.5
START_S = 120.0


@dataclass(frozen=True)
class Allocation:
    """The rank of this task in a Slurm job of several nodes. `tag` names the job and the number of its restart."""

    tag: str
    rank: int
    num_nodes: int

    def file(self, folder: Path, suffix: str) -> Path:
        """Return the path of a file in the run folder by which the tasks of this job communicate."""
        return folder / f"ray_{self.tag}.{suffix}"


def allocation(environ: Mapping[str, str] = os.environ) -> Allocation | None:
    """Return the Slurm job of several nodes in which this process runs; None on a single node or outside Slurm.

    Raises:
        RunError: the job does not have exactly one task on each node.
    """
    if "SLURM_PROCID" not in environ or int(environ.get("SLURM_STEP_NUM_NODES", "1")) == 1:
        return None
    nodes, tasks = int(environ["SLURM_STEP_NUM_NODES"]), int(environ["SLURM_NTASKS"])
    if tasks != nodes:
        raise RunError(f"the Slurm job has {tasks} tasks on {nodes} nodes: set hydra.launcher.tasks_per_node=1")
    restart = environ.get("SLURM_RESTART_COUNT", "0")
    return Allocation(f"{environ['SLURM_JOB_ID']}-{restart}", int(environ["SLURM_PROCID"]), nodes)


def is_first_node() -> bool:
    """Return whether this process drives the run; the others of a Slurm job lend it their nodes."""
    here = allocation()
    return here is None or here.rank == 0


@contextmanager
def head(allocation: Allocation, folder: Path, config: LaunchConfig) -> Iterator[str]:
    """Start the head of Ray on this node and yield its address, `host:port`; stop Ray on all nodes after the block."""
    token = allocation.file(folder, "token")
    folder.mkdir(parents=True, exist_ok=True)
    token.touch(mode=0o600)
    token.write_text(secrets.token_hex(32))
    host = socket.gethostbyname(socket.gethostname())
    port = _free_port(host)
    role = ["--head", f"--node-ip-address={host}", f"--port={port}", "--include-dashboard=false"]
    try:
        with _node(token, config, role) as daemon:
            _wait(lambda: _listens(host, port), daemon, "the head of Ray to listen")
            write_json(allocation.file(folder, "json"), {"address": f"{host}:{port}"})
            yield f"{host}:{port}"
    finally:
        write_text(allocation.file(folder, "stop"), "")
        token.unlink(missing_ok=True)


def join_node(folder: Path, config: LaunchConfig) -> bool:
    """Join this node to the cluster until the run ends, and return True. On the first node return False at once."""
    here = allocation()
    if here is None or here.rank == 0:
        return False
    address, stop = here.file(folder, "json"), here.file(folder, "stop")
    _wait(address.exists, None, f"{address} from the first node")
    head_address = json.loads(address.read_text())["address"]
    # deferred: the scheduler signals all nodes, but only the driver on the first node may act upon the signal
    with _node(here.file(folder, "token"), config, [f"--address={head_address}"]) as daemon, defer_signals():
        poll_until(lambda: stop.exists() or daemon.poll() is not None, poll_s=POLL_S)
    return True


def wait_for_nodes(allocation: Allocation, timeout_s: float) -> None:
    """Wait until all nodes of the job have joined the cluster; raise RunError after `timeout_s` seconds."""
    import ray

    def alive() -> int:
        return sum(node["Alive"] for node in ray.nodes())

    if not poll_until(lambda: alive() >= allocation.num_nodes, timeout_s, POLL_S):
        raise RunError(
            f"{alive()} of {allocation.num_nodes} nodes joined Ray within {timeout_s:g} s (launch.timeout_s)"
        )


@contextmanager
def _node(token: Path, config: LaunchConfig, role: list[str]) -> Iterator[subprocess.Popen[bytes]]:
    """Run the daemons of Ray on this node; kill all of their processes after the block."""
    command = [sys.executable, "-m", "ray.scripts.scripts", "start", "--block", "--disable-usage-stats"]
    with session() as place:
        command += [
            f"--num-cpus={config.num_cpus or cpu_count()}",
            f"--object-store-memory={config.store_bytes}",
            f"--temp-dir={place.ray}",
            *role,
        ]
        credentials = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(token.absolute())}
        environment = os.environ | credentials | place.environment
        with block_signals():
            daemon = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        try:
            yield daemon
        finally:
            daemon.kill()
            daemon.wait()  # no-limit: the kernel ends what is killed


def _wait(ready: Callable[[], bool], daemon: subprocess.Popen[bytes] | None, activity: str) -> None:
    """Wait until `ready()`. Raise RunError, which names `activity`, if the daemon ends or START_S seconds pass."""

    def is_over() -> bool:
        return ready() or (daemon is not None and daemon.poll() is not None)

    in_time = poll_until(is_over, START_S, POLL_S)
    if daemon is not None and daemon.poll() is not None:
        raise RunError(f"`ray start` ended with exit code {daemon.returncode} while waiting for {activity}")
    if not in_time:
        raise RunError(f"waited {START_S:g} s for {activity}, without success")


def _listens(host: str, port: int) -> bool:
    """Return whether a server accepts connections at this address."""
    with socket.socket() as probe:
        probe.settimeout(1)
        return probe.connect_ex((host, port)) == 0


def _free_port(host: str) -> int:
    """Return a port that is free at this moment."""
    with socket.socket() as probe:
        probe.bind((host, 0))
        return int(probe.getsockname()[1])
