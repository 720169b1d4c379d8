"""One cluster of Ray over the nodes of a Slurm job, whose tasks all run the same program, one task on each node.

The first task starts the head of Ray before it loads anything, and goes on with the run. The other tasks join their
nodes to the cluster until the run ends. The tasks communicate through small files in the run folder, which must be on a
file system that all nodes share: the address of the head, how each of the other tasks is, and that the run has ended.
"""

from __future__ import annotations

import json
import os
import secrets
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from rlhf_suite.config.declarations.launch import LaunchConfig
from rlhf_suite.disk import write_json, write_text
from rlhf_suite.errors import RunError
from rlhf_suite.launch.actor_log import Member
from rlhf_suite.launch.address import choose_address, find_source, join_address, split_address
from rlhf_suite.launch.environment import cluster_to_join
from rlhf_suite.launch.lost_nodes import NodeLost
from rlhf_suite.launch.session import session
from rlhf_suite.launch.slurm import Allocation, allocation, list_nodes
from rlhf_suite.launch.stop import block_signals, defer_signals
from rlhf_suite.machine_limits import cpu_count
from rlhf_suite.polling import poll_until
from rlhf_suite.run_folders.run_folder import RunFolder
from rlhf_suite.waits import LIMIT, waiting

POLL_S = 0.5
START_S = 120.0  # for Ray to start on a node
# A file of another node may be seen late: clients of NFS remember for a minute that there was none.
SEEN_S = 75.0
WAITS, JOINS, ENDED = "waits", "joins", "ended"  # the states of a task that is not the first
# Ray serves numbers about each node to everybody who can connect; nobody asks for them here. Those of the dashboard,
# which Ray starts in part even without one, can only be left out by a port that does not exist.
NO_METRICS = {"RAY_enable_metrics_collection": "0", "DASHBOARD_METRIC_PORT": "99999"}
HOOK = {"RAY_START_HOOK": f"{__name__}.leave_out"}


@dataclass(frozen=True)
class Report:
    """How the task of a node is: it waits for the head's address, its node joins Ray, or it has ended by an error."""

    node: str
    state: str
    address: str = ""
    error: str = ""


def leave_out(params: object, head: bool) -> None:
    """Leave out two services of Ray's head that the suite does not use, and whose ports are fixed: two runs could not
    share a node. `ray start` calls this function with its parameters."""
    vars(params).update(ray_client_server_port=None, no_monitor=True)


@contextmanager
def lead_nodes(folder: Path, config: LaunchConfig) -> Iterator[None]:
    """On the first of several nodes of a Slurm job, run the head of Ray in the block; then stop Ray on all nodes."""
    here = allocation()
    if here is None or cluster_to_join(config) is not None:
        yield
        return
    token = here.file(folder, "token")
    folder.mkdir(parents=True, exist_ok=True)
    token.touch(mode=0o600)
    token.write_text(secrets.token_hex(32), encoding="utf-8")

    def tell_end() -> None:
        write_text(here.file(folder, "stop"), "")

    with ExitStack() as stack:
        stack.callback(token.unlink, missing_ok=True)
        stack.callback(tell_end)
        host = choose_address(here.node, list_nodes())
        port = _free_port(host)
        role = ["--head", f"--node-ip-address={host}", f"--port={port}", "--include-dashboard=false"]
        daemons = stack.enter_context(_node(here, folder, config, role))
        stack.callback(tell_end)  # before Ray ends: the other tasks would take its end for a fault
        _wait_for_start(lambda: _listens(host, port), daemons)
        write_json(here.file(folder, "json"), {"address": join_address(host, port)})
        yield


def read_head(here: Allocation, folder: Path) -> str:
    """Return the address of the head of Ray, `host:port`."""
    return str(json.loads(here.file(folder, "json").read_text(encoding="utf-8"))["address"])


def join_node(folder: Path, config: LaunchConfig) -> bool:
    """Lend this node to the cluster until the run ends, and return True. On the first node return False at once."""
    here = allocation()
    if here is None or here.rank == 0:
        return False
    if cluster_to_join(config) is None:
        folder.mkdir(parents=True, exist_ok=True)
        try:
            # The scheduler signals all nodes, but only the driver on the first node may act upon the signal.
            with defer_signals():
                _lend(here, folder, config)
        except BaseException as error:
            _report(here, folder, ENDED, error=str(error) or type(error).__name__)
            raise
    return True


def _lend(here: Allocation, folder: Path, config: LaunchConfig) -> None:
    """Wait for the head, join its cluster, and return when the run has ended.

    Raises:
        RunError: there is no head in time.
        NodeLost: Ray ends here before the run does.
    """
    address, stop = here.file(folder, "json"), here.file(folder, "stop")
    _report(here, folder, WAITS)
    with waiting(f"{address} from the first node", limit_s=config.timeout_s, flag=LIMIT):
        in_time = poll_until(lambda: address.exists() or stop.exists(), config.timeout_s, POLL_S)
    if stop.exists():
        return
    if not in_time:
        raise RunError(
            f"the first node has not written {address} within {config.timeout_s:g} s ({LIMIT}): see the log of its "
            "task, and whether all nodes see the run folder"
        )
    head = read_head(here, folder)
    place = split_address(head)
    own = None if place is None else find_source(place[0])
    if own is None:
        raise RunError(
            f"{here.node} has no route to the head of Ray at {head}: add a route, or set NodeAddr of the first node in "
            "slurm.conf to an address that all nodes reach"
        )
    with _node(here, folder, config, [f"--address={head}", f"--node-ip-address={own}"]) as daemons:
        _report(here, folder, JOINS, own)
        poll_until(lambda: stop.exists() or daemons.end is not None, poll_s=POLL_S)  # no-limit: as long as the run
        if daemons.end is not None and not poll_until(stop.exists, SEEN_S, POLL_S):
            raise NodeLost(f"Ray ended on {here.node} ({own}) before the run did, with {daemons.end}")


def _report(here: Allocation, folder: Path, state: str, address: str = "", error: str = "") -> None:
    """Say how this task is, to the first node."""
    write_json(here.file(folder, f"{here.rank}.json"), asdict(Report(here.node, state, address, error)), durable=False)


def read_reports(here: Allocation, folder: Path) -> list[Report]:
    """Return what the other tasks have said of themselves."""
    files = [here.file(folder, f"{rank}.json") for rank in range(1, here.num_nodes)]
    return [Report(**json.loads(file.read_text(encoding="utf-8"))) for file in files if file.exists()]


def wait_for_nodes(here: Allocation, folder: Path, timeout_s: float) -> None:
    """Wait until all nodes of the job have joined the cluster.

    Raises:
        RunError: the task of a node has ended; the message says which one, and why.
        NodeLost: nodes are missing after `timeout_s` seconds.
    """
    import ray

    def living() -> set[str]:
        return {str(node["NodeID"]) for node in ray.nodes() if node["Alive"]}

    def is_over() -> bool:
        return len(living()) >= here.num_nodes or any(one.state == ENDED for one in read_reports(here, folder))

    with waiting(f"{here.num_nodes - 1} other nodes to join Ray", limit_s=timeout_s, flag=LIMIT):
        poll_until(is_over, timeout_s, POLL_S)
    if (count := len(living())) < here.num_nodes:
        reports = read_reports(here, folder)
        for one in reports:
            if one.state == ENDED:
                raise RunError(f"the task on {one.node} has ended before the run: {one.error}")
        known = {str(node["NodeManagerAddress"]) for node in ray.nodes() if node["Alive"]}
        missing = "; ".join(describe_missing(here.node, list_nodes(), reports, known))
        raise NodeLost(f"{count} of {here.num_nodes} nodes joined Ray within {timeout_s:g} s ({LIMIT}). {missing}")


def describe_missing(here: str, nodes: Mapping[str, str], reports: list[Report], joined: set[str]) -> Iterator[str]:
    """Yield what is known of each node that is missing in Ray.

    Args:
        here: the name of the first node.
        nodes: the addresses of all nodes by their names, as Slurm knows them; empty if Slurm does not say.
        reports: what the tasks have said of themselves.
        joined: the addresses of the nodes that are in Ray.
    """
    for name in sorted({*nodes} - {here, *(one.node for one in reports)}):
        yield f"Nothing was heard of {name} ({nodes[name]}): its task has not started, or does not see the run folder"
    for one in reports:
        if one.state == WAITS:
            yield f"The task on {one.node} waits for the first node: does it see the same run folder?"
        elif one.address not in joined:
            yield f"{one.node} ({one.address}) has started Ray, which does not reach the head"


@dataclass(frozen=True)
class _Daemons:
    """The process that runs the daemons of Ray on this node, and the file that has its output."""

    process: subprocess.Popen[bytes]
    output: Member

    @property
    def end(self) -> str | None:
        """Return how they have ended: the exit code, and the last lines of the output. None: they have not."""
        code = self.process.poll()
        return None if code is None else f"exit code {code}; {self.output.tail()}"


@contextmanager
def _node(here: Allocation, folder: Path, config: LaunchConfig, role: list[str]) -> Iterator[_Daemons]:
    """Run the daemons of Ray on this node; kill all of their processes after the block."""
    token, name = here.file(folder, "token"), f"ray-{here.node}"
    output = Member(name, RunFolder(folder).logs / f"{name}.log")
    output.log.parent.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "ray.scripts.scripts", "start", "--block", "--disable-usage-stats"]
    with session() as place:
        command += [
            f"--num-cpus={config.num_cpus or cpu_count()}",
            f"--object-store-memory={config.store_bytes}",
            f"--temp-dir={place.ray}",
            "--dashboard-agent-listen-port=0",  # any free one: two runs may share a node
            *role,
        ]
        credentials = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(token.absolute())}
        environment = os.environ | credentials | NO_METRICS | HOOK | place.environment
        with block_signals(), output.log.open("wb") as log:
            process = subprocess.Popen(command, env=environment, stdout=log, stderr=subprocess.STDOUT)
        try:
            yield _Daemons(process, output)
        finally:
            process.kill()
            process.wait()  # no-limit: the kernel ends what is killed


def _wait_for_start(is_ready: Callable[[], bool], daemons: _Daemons) -> None:
    """Wait until the head of Ray is ready. Raise RunError if its daemons end or START_S seconds pass."""
    with waiting("the head of Ray to listen", limit_s=START_S):
        in_time = poll_until(lambda: is_ready() or daemons.end is not None, START_S, POLL_S)
    if daemons.end is not None:
        raise RunError(f"Ray ended before its head listened, with {daemons.end}")
    if not in_time:
        raise RunError(f"the head of Ray does not listen after {START_S:g} s; {daemons.output.tail()}")


def _listens(host: str, port: int) -> bool:
    """Return whether a server accepts connections at this address."""
    try:
        with socket.create_connection((host, port), timeout=1):
            return True
    except OSError:
        return False


def _free_port(host: str) -> int:
    """Return a port that is free at this moment."""
    with socket.create_server((host, 0), family=socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        return int(probe.getsockname()[1])
