"""One Ray cluster over the nodes of one Slurm job: every task of the job runs the same program, one task per node.

The first task starts the head and goes on with the run; the others lend their node until the run ends. They find each
other through two small files in the run folder, which all nodes share: the head's address, and a stop mark.
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
from rlhf_suite.launch.stop import deferred, signals_blocked
from rlhf_suite.polling import poll_until

POLL_S = 0.5
START_S = 120.0


@dataclass(frozen=True)
class Allocation:
    """This task's place in a Slurm job of several nodes. `tag` names the job and its restart."""

    tag: str
    rank: int
    num_nodes: int

    def file(self, folder: Path, suffix: str) -> Path:
        return folder / f"ray_{self.tag}.{suffix}"


def allocation(environ: Mapping[str, str] = os.environ) -> Allocation | None:
    """The allocation this process runs in, or None outside Slurm and on a single node."""
    if "SLURM_PROCID" not in environ or int(environ.get("SLURM_STEP_NUM_NODES", "1")) == 1:
        return None
    nodes, tasks = int(environ["SLURM_STEP_NUM_NODES"]), int(environ["SLURM_NTASKS"])
    if tasks != nodes:
        raise RunError(f"the Slurm job has {tasks} tasks on {nodes} nodes: set hydra.launcher.tasks_per_node=1")
    restart = environ.get("SLURM_RESTART_COUNT", "0")
    return Allocation(f"{environ['SLURM_JOB_ID']}-{restart}", int(environ["SLURM_PROCID"]), nodes)


@contextmanager
def head(allocation: Allocation, folder: Path, config: LaunchConfig) -> Iterator[str]:
    """Start the head on this node; yields its address, `host:port`. Ends every node's Ray on leaving."""
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


def serve_node(folder: Path, config: LaunchConfig) -> bool:
    """On every node but the first: lend the node until the run ends, then True. Elsewhere: False at once."""
    here = allocation()
    if here is None or here.rank == 0:
        return False
    address, stop = here.file(folder, "json"), here.file(folder, "stop")
    _wait(address.exists, None, f"{address} from the first node")
    head_address = json.loads(address.read_text())["address"]
    # deferred: a signal that the scheduler sends to all nodes is for the driver on the first one to act upon
    with _node(here.file(folder, "token"), config, [f"--address={head_address}"]) as daemon, deferred():
        poll_until(lambda: stop.exists() or daemon.poll() is not None, poll_s=POLL_S)
    return True


def wait_for_nodes(allocation: Allocation, timeout_s: float) -> None:
    """Wait until every node of the job has joined."""
    import ray

    def alive() -> int:
        return sum(node["Alive"] for node in ray.nodes())

    if not poll_until(lambda: alive() >= allocation.num_nodes, timeout_s, POLL_S):
        raise RunError(
            f"{alive()} of {allocation.num_nodes} nodes joined Ray within {timeout_s:g} s (launch.timeout_s)"
        )


@contextmanager
def _node(token: Path, config: LaunchConfig, role: list[str]) -> Iterator[subprocess.Popen[bytes]]:
    """Ray's daemons of this node; all its processes are gone after the block."""
    command = [sys.executable, "-m", "ray.scripts.scripts", "start", "--block", "--disable-usage-stats"]
    with session() as place:
        command += [
            f"--num-cpus={config.num_cpus or cpu_count()}",
            f"--object-store-memory={config.object_store_mb << 20}",
            f"--temp-dir={place.ray}",
            *role,
        ]
        credentials = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(token.absolute())}
        environment = os.environ | credentials | place.environment
        with signals_blocked():
            daemon = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        try:
            yield daemon
        finally:
            daemon.kill()
            daemon.wait()


def _wait(ready: Callable[[], bool], daemon: subprocess.Popen[bytes] | None, what: str) -> None:
    """Wait until `ready`; a daemon that ends meanwhile, and the end of the time, are errors that name `what`."""

    def is_over() -> bool:
        return ready() or (daemon is not None and daemon.poll() is not None)

    in_time = poll_until(is_over, START_S, POLL_S)
    if daemon is not None and daemon.poll() is not None:
        raise RunError(f"`ray start` ended with exit code {daemon.returncode} while waiting for {what}")
    if not in_time:
        raise RunError(f"waited {START_S:g} s for {what}")


def _listens(host: str, port: int) -> bool:
    with socket.socket() as probe:
        probe.settimeout(1)
        return probe.connect_ex((host, port)) == 0


def _free_port(host: str) -> int:
    with socket.socket() as probe:
        probe.bind((host, 0))
        return int(probe.getsockname()[1])
