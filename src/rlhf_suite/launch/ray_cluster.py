"""The Ray cluster of a run: a private one by default, never somebody else's by accident, and gone when the run is over.

Private: loopback addresses only, a token of its own, a folder that only this user can enter (`session.py`).
With `launch.ray_address` the run joins a cluster that runs already, and only leaves it at the end.
Inside a Slurm allocation of several nodes the cluster spans them (`launch/slurm.py`).
"""

from __future__ import annotations

import math
import secrets
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rlhf_suite.config.launch import LaunchConfig
from rlhf_suite.errors import RunError
from rlhf_suite.launch import slurm
from rlhf_suite.launch.environment import cpu_count, device_kind, gpu_count, runtime_env
from rlhf_suite.launch.placement import CPUS_PER_DEVICE
from rlhf_suite.launch.session import Session, environment, session
from rlhf_suite.launch.stop import signals_blocked

CONNECT_S = 10.0


@contextmanager
def ray_cluster(config: LaunchConfig, folder: Path, slots: int) -> Iterator[None]:
    """Ray for the length of the block. `slots`: actors that will run at once, for which CPU shares are made.

    The signals of `stop.py` keep the handlers that they have: Ray's own would abort the process.
    """
    device = device_kind(config)
    allocation = slurm.allocation()
    if config.ray_address is not None:
        cluster = _joined(config.ray_address)
    elif allocation is not None:
        cluster = _spanning(allocation, folder, config)
    else:
        cluster = _private(config, device, _num_cpus(config, device, slots))
    with environment(runtime_env(device)), cluster:
        yield


def known_gpus(config: LaunchConfig) -> int | None:
    """GPUs of the cluster that `ray_cluster` makes; None when it is more than this machine."""
    return gpu_count() if config.ray_address is None and slurm.allocation() is None else None


def _num_cpus(config: LaunchConfig, device: str, slots: int) -> int:
    """CPU slots of this node: as set, else this machine's cores, and on CPU enough for every actor's share."""
    if config.num_cpus is not None:
        return config.num_cpus
    return max(cpu_count(), math.ceil(slots * CPUS_PER_DEVICE)) if device == "cpu" else cpu_count()


@contextmanager
def _private(config: LaunchConfig, device: str, num_cpus: int) -> Iterator[None]:
    with session() as place:
        token = place.folder / "token"
        token.touch(mode=0o600)
        token.write_text(secrets.token_hex(32))
        with _credentials(token), _loopback(), _left(place):
            import ray

            with environment(place.environment), signals_blocked():
                ray.init(
                    address="local",
                    num_cpus=num_cpus,
                    num_gpus=0 if device == "cpu" else None,
                    object_store_memory=config.object_store_mb << 20,
                    include_dashboard=False,
                    log_to_driver=False,
                    logging_level="ERROR",
                    _temp_dir=str(place.ray),
                )
            yield


@contextmanager
def _left(place: Session) -> Iterator[None]:
    """Leave the cluster at the end of the block and kill its daemons.

    Ray would ask each daemon with SIGTERM, to which they are deaf (`signals_blocked`), and wait a second for it.
    """
    import ray
    from ray._private import worker

    try:
        yield
    finally:
        place.leave()
        node, worker._global_node = worker._global_node, None
        ray.shutdown()
        if node is not None:
            node.kill_all_processes(check_alive=False, allow_graceful=False)


@contextmanager
def _joined(address: str) -> Iterator[None]:
    import ray

    try:
        _check_listens(address)
        with signals_blocked():
            ray.init(address=address, log_to_driver=False, logging_level="ERROR")
    except (OSError, ValueError, RuntimeError) as error:
        raise RunError(
            f"launch.ray_address={address}: no Ray cluster answers there ({error}); "
            "start one with `ray start --head`, or leave launch.ray_address out for a private one"
        ) from error
    with _shutdown():
        yield


def _check_listens(address: str) -> None:
    """Fail within seconds where nothing listens; Ray itself goes on trying for minutes."""
    host, _, port = address.rpartition(":")
    if host and port.isdigit():
        socket.create_connection((host, int(port)), timeout=CONNECT_S).close()


@contextmanager
def _spanning(allocation: slurm.Allocation, folder: Path, config: LaunchConfig) -> Iterator[None]:
    token = allocation.file(folder, "token")
    with slurm.head(allocation, folder, config) as address, _credentials(token), _joined(address):
        slurm.wait_for_nodes(allocation, config.timeout_s)
        yield


@contextmanager
def _credentials(token: Path) -> Iterator[None]:
    """The cluster's own token instead of the user's: other users of the machine cannot run code in it."""
    from ray._raylet import AuthenticationTokenLoader, Config  # type: ignore[attr-defined]

    def reread() -> None:  # Ray reads these variables when it is imported, which may have been before
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
    """Every daemon listens on 127.0.0.1 alone: Ray's mode for laptops, chosen by a constant and by its variable."""
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
    import ray

    try:
        yield
    finally:
        ray.shutdown()
