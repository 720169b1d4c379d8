"""Bringing up the ranks of one model: this process when there is one, else Ray actors."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from rlhf_suite.config.declarations.launch import LaunchConfig
from rlhf_suite.config.plan.placement import Placement
from rlhf_suite.distributed.group import Group, LocalGroup
from rlhf_suite.distributed.worker import Worker
from rlhf_suite.launch.environment import runtime_env
from rlhf_suite.launch.placement import reserve
from rlhf_suite.launch.ray_cluster import ray_cluster
from rlhf_suite.run_folders.run_folder import RunFolder


@contextmanager
def start_ranks(
    cls: type[Worker], placement: Placement, launch: LaunchConfig, folder: RunFolder, args: tuple[object, ...]
) -> Iterator[Group]:
    """Start the ranks of the one model of a placement, each built with `args`, and wait until they are up."""
    (pool,), device = placement.pools, placement.device
    if placement.num_actors == 1:
        yield LocalGroup(cls, pool.name, device, args)
        return
    from rlhf_suite.distributed.workers import GroupOptions, WorkerGroup

    axes = placement.sequence, placement.tensor
    options = GroupOptions(device, folder.logs, launch.timeout_s, runtime_env(device), *axes)
    with ray_cluster(launch, folder.path, placement.num_devices):
        group = WorkerGroup(cls, pool.name, reserve(placement, launch.timeout_s)[pool.name], options, args)
        group.ready()
        yield group
