"""Start the Ray cluster of a run, or join one, and leave nothing of it behind when the run ends.

By default the cluster is private: it has loopback addresses only, a token of its own, and a folder that only this user
can enter (`session.py`). With `launch.ray_address` the run joins an existing cluster and only disconnects at the end.
Inside a Slurm allocation of several nodes the cluster spans these nodes (`launch/nodes.py`).
"""

from __future__ import annotations

import math
import os
import secrets
import socket
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from rlhf_suite.background import in_background
from rlhf_suite.config.declarations.launch import LaunchConfig
from rlhf_suite.config.plan.run_plan import Machine
from rlhf_suite.errors import RunError
from rlhf_suite.launch import nodes, slurm
from rlhf_suite.launch.address import is_loopback, join_address, split_address
from rlhf_suite.launch.environment import cluster_to_join, device_kind, gpu_count, runtime_env
from rlhf_suite.launch.lost_nodes import name_lost_nodes
from rlhf_suite.launch.placement import CPUS_PER_DEVICE
from rlhf_suite.launch.session import Session, environment, session
from rlhf_suite.launch.stop import block_signals
from rlhf_suite.machine_limits import cpu_count
from rlhf_suite.tracking.console import show_line
from rlhf_suite.waits import waiting

CONNECT_S = 10.0
ANSWER_S = 30.0  # for the first answer of a cluster that accepts connections
TRIES = 3  # to start a private cluster: Ray gives its daemons 30 s, which a busy machine may exceed
LATE = "timed out during startup"  # what Ray says then


@contextmanager
def ray_cluster(config: LaunchConfig, folder: Path, slots: int) -> Iterator[None]:
    """Connect to Ray for the duration of the block.

    Args:
        config: the section `launch`.
        folder: the run folder, through which the nodes of a Slurm job find each other.
        slots: the devices of the run; on CPU, the cluster gets a share of the cores for each.

    The signal handlers of `stop.py` stay in place: the handlers that Ray installs would abort the process.
    """
    device = device_kind(config)
    allocation = slurm.allocation()
    if (address := cluster_to_join(config)) is not None:
        cluster = _join(address, config.timeout_s)
    elif allocation is not None:
        cluster = _span_nodes(allocation, folder, config)
    else:
        cluster = _private(config, device, _num_cpus(config, slots))
    with environment(runtime_env(device)), cluster:
        yield


def machine(config: LaunchConfig) -> Machine:
    """Return what is known of the devices of the cluster that `ray_cluster` makes. GPUs that are asked for where there
    are none are those of another machine."""
    device, count = device_kind(config), gpu_count()
    is_here = cluster_to_join(config) is None and slurm.allocation() is None and (device == "cpu" or count > 0)
    return Machine(device, count if is_here else None)


def _num_cpus(config: LaunchConfig, slots: int) -> int:
    """Return the CPU slots of this node: the flag, or the number of cores, at least a share for every device."""
    if config.num_cpus is not None:
        return config.num_cpus
    return max(cpu_count(), math.ceil(slots * CPUS_PER_DEVICE))


@contextmanager
def _private(config: LaunchConfig, device: str, num_cpus: int) -> Iterator[None]:
    """Start a private cluster on this machine, with further tries if its daemons are late, and stop it after the
    block.

    Raises:
        RunError: they are late each time.
    """
    with ExitStack() as stack:
        for attempt in range(1, TRIES + 1):
            try:
                stack.enter_context(_start(config, device, num_cpus))
                break
            except Exception as error:
                if LATE not in str(error):
                    raise
                if attempt == TRIES:
                    busy = f"a load average of {os.getloadavg()[0]:.0f} on {cpu_count()} cores"
                    problem = f"Ray did not start on this machine within 30 s, {TRIES} times ({busy})"
                    raise RunError(f"{problem}; start the run again when the machine has less to do") from error
        yield


@contextmanager
def _start(config: LaunchConfig, device: str, num_cpus: int) -> Iterator[None]:
    """Start a private cluster, in a session of its own, and stop it after the block."""
    with session() as place:
        token = place.folder / "token"
        token.touch(mode=0o600)
        token.write_text(secrets.token_hex(32), encoding="utf-8")
        with _credentials(token), _loopback(), _leave(place):
            import ray

            with environment(place.environment), block_signals():
                ray.init(
                    address="local",
                    num_cpus=num_cpus,
                    num_gpus=0 if device == "cpu" else None,
                    object_store_memory=config.store_bytes,
                    include_dashboard=False,
                    log_to_driver=False,
                    logging_level="ERROR",
                    _temp_dir=str(place.ray),
                    # Actors have an environment of their own, so that workers started in advance would not be used.
                    _system_config={"prestart_worker_first_driver": False},
                )
            yield


@contextmanager
def _leave(place: Session) -> Iterator[None]:
    """Disconnect from the cluster at the end of the block and kill its daemons.

    Ray itself would send SIGTERM to each daemon, which blocks this signal (`block_signals`), and wait for a second.
    """
    from ray._private import worker

    try:
        yield
    finally:
        place.leave()
        node, worker._global_node = worker._global_node, None
        _disconnect()
        if node is not None:
            node.kill_all_processes(check_alive=False, allow_graceful=False)


@contextmanager
def _join(address: str, timeout_s: float) -> Iterator[None]:
    """Connect to the cluster at `address` for the block; raise RunError if none answers there in time."""
    import ray
    from ray.exceptions import RayError

    try:
        number = resolve(address)
        check_answers(number)
        # Ray asks a name server itself, whatever /etc/hosts says, and for minutes if that does not answer.
        with block_signals(), waiting(f"the Ray cluster at {address}", limit_s=timeout_s):
            ray.init(address=number, log_to_driver=False, logging_level="ERROR")
    except (OSError, ValueError, RuntimeError, RayError) as error:
        reason = str(error).rstrip(".")
        raise RunError(
            f"launch.ray_address={address}: no Ray cluster answers there ({reason}); "
            "start one with `ray start --head`, or remove launch.ray_address for a private cluster"
        ) from error
    with _shutdown(), name_lost_nodes():
        check_addresses(ray.nodes())
        if (warning := describe_open_door(ray.get_runtime_context().gcs_address)) is not None:
            show_line(warning, to_stderr=True)
        yield


def describe_open_door(address: str) -> str | None:
    """Return a warning if the cluster at `address`, which this process has joined, asks nobody for a token."""
    from ray._private.authentication.authentication_utils import is_token_auth_enabled

    place = split_address(address)
    if is_token_auth_enabled() or (place is not None and is_loopback(place[0])):
        return None
    return (
        f"Warning: the Ray cluster at {address} asks for no token, so everybody who reaches this address can run "
        "programs as you; start it with RAY_AUTH_MODE=token (docs/slurm.md)"
    )


def check_addresses(known: Sequence[Mapping[str, Any]]) -> None:
    """Raise RunError if Ray knows one of several hosts by an address that only this host itself can reach."""
    living = [node for node in known if node["Alive"]]
    if len({node["NodeManagerHostname"] for node in living}) > 1:
        for node in living:
            if is_loopback(node["NodeManagerAddress"]):
                name, address = node["NodeManagerHostname"], node["NodeManagerAddress"]
                raise RunError(
                    f"Ray knows the node {name} by the address {address}, which no other node can reach: start Ray "
                    "there with --node-ip-address=<its address in the network>"
                )


def check_answers(address: str) -> None:
    """Raise an error within `ANSWER_S` seconds unless a Ray cluster answers at `address`.

    `ray.init` would ask what accepts connections and never speaks for seven minutes, deaf to signals. So a client of
    Ray asks once before, in a thread that is left to itself if it is late.
    """
    from ray._private.services import canonicalize_bootstrap_address
    from ray._raylet import GcsClient  # type: ignore[attr-defined]

    if (known := canonicalize_bootstrap_address(address)) is None:  # Ray starts a cluster here
        return
    with waiting(f"an answer of the Ray cluster at {address}", limit_s=ANSWER_S):
        asked = in_background("Ray's client", lambda: GcsClient(address=known))
        try:
            asked.result(ANSWER_S)
        except TimeoutError:
            raise TimeoutError(f"what listens there did not speak as Ray does within {ANSWER_S:g} s") from None


def resolve(address: str) -> str:
    """Return `host:port` with the number of the host; what is not of this form, such as `auto`, is returned as it is.

    Raises:
        OSError: nothing listens there, or nobody knows the host. This takes seconds; Ray itself would try for minutes.
        ValueError: the address has a protocol, such as that of Ray's clients, through which a run cannot start actors.
    """
    if "://" in address:
        raise ValueError("it has a protocol in front; write host:port")
    if (place := split_address(address)) is None:
        return address

    def connect() -> str:
        with socket.create_connection(place, timeout=CONNECT_S) as connection:
            return str(connection.getpeername()[0])

    try:
        number = in_background("name server", connect).result(2 * CONNECT_S)
    except TimeoutError:
        raise TimeoutError(f"neither a name server nor the host has answered within {CONNECT_S:g} s") from None
    return join_address(number, place[1])


@contextmanager
def _span_nodes(allocation: slurm.Allocation, folder: Path, config: LaunchConfig) -> Iterator[None]:
    """Use the cluster over all nodes of the Slurm job, whose head runs already, for the block."""
    address = nodes.read_head(allocation, folder)
    with _credentials(allocation.file(folder, "token")), _join(address, config.timeout_s):
        nodes.wait_for_nodes(allocation, folder, config.timeout_s)
        yield


@contextmanager
def _credentials(token: Path) -> Iterator[None]:
    """Use the token of this cluster in the block, so that other users of the machine cannot run code in it."""
    from ray._raylet import AuthenticationTokenLoader, Config  # type: ignore[attr-defined]

    def reread() -> None:  # Ray reads these variables at its import, which may have happened before
        Config.initialize("")
        AuthenticationTokenLoader.instance().reset_cache()

    try:
        with environment({"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(token.absolute())}):
            reread()
            yield
    finally:
        reread()


@contextmanager
def _loopback() -> Iterator[None]:
    """Make every daemon listen on 127.0.0.1 only. A constant and an environment variable select this mode of Ray."""
    from ray._private import ray_constants

    before = ray_constants.ENABLE_RAY_CLUSTER
    ray_constants.ENABLE_RAY_CLUSTER = False
    try:
        with environment({ray_constants.ENABLE_RAY_CLUSTERS_ENV_VAR: "0"}):
            yield
    finally:
        ray_constants.ENABLE_RAY_CLUSTER = before


@contextmanager
def _shutdown() -> Iterator[None]:
    """Disconnect from Ray after the block."""
    try:
        yield
    finally:
        _disconnect()


def _disconnect() -> None:
    """Disconnect from Ray. It gives SIGTERM back to the system, below Python, so that the next one would kill the
    process in the middle of its last writes: `block_signals` has our handler again at its end."""
    import ray

    with block_signals():
        ray.shutdown()
