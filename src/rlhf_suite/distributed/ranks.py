"""Bringing up the ranks of one model: this process when there is one, else Ray actors."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from rlhf_suite.config.launch import LaunchConfig
from rlhf_suite.config.plan import Placement, Pool, Role
from rlhf_suite.distributed.group import Group, LocalGroup
from rlhf_suite.distributed.workers import GroupOptions, Worker, WorkerGroup
from rlhf_suite.launch.environment import device_kind, runtime_env
from rlhf_suite.launch.placement import reserve
from rlhf_suite.launch.ray_cluster import ray_cluster
from rlhf_suite.tracking.run_folder import RunFolder


@contextmanager
def running(
    cls: type[Worker], name: str, ranks: int, launch: LaunchConfig, folder: RunFolder, args: tuple[object, ...]
) -> Iterator[Group]:
    """Start `ranks` workers of a class, each built with `args`, and wait until they are up."""
    device = device_kind(launch)
    if ranks == 1:
        yield LocalGroup(cls, name, device, args)
        return
    placement = Placement(device, (Pool((Role(name, ranks),)),))
    options = GroupOptions(device, folder.logs, launch.timeout_s, runtime_env(device))
    with ray_cluster(launch, folder.path, ranks):
        group = WorkerGroup(cls, name, reserve(placement, launch.timeout_s)[name], options, args)
        group.ready()
        yield group
