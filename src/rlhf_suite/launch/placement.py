"""Devices for actors: `reserve` gets those of a placement (`config.plan`) from Ray, within a deadline.

A device is a GPU, or on a machine without one a small share of the CPU: the same placement runs on both.
Roles in one pool share its devices: actor i of each role sits on device i.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rlhf_suite.config.plan import Placement, Pool, Role
from rlhf_suite.errors import RunError

if TYPE_CHECKING:
    from ray.util.placement_group import PlacementGroup

# Small, so that tens of actors fit on a few cores: on a CPU they take turns anyway, and on a GPU cores are plenty.
CPUS_PER_DEVICE = 0.25
RESOURCE_STEPS = 10_000  # Ray counts resources in ten-thousandths


@dataclass(frozen=True)
class Slot:
    """The place of one actor: a bundle of a placement group, or anywhere, and what the actor takes of it."""

    num_cpus: float
    num_gpus: float = 0.0
    group: PlacementGroup | None = None
    bundle: int = -1

    def options(self) -> dict[str, Any]:
        """Return the keyword arguments for `ray.remote(cls).options(...)`."""
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        options: dict[str, Any] = {"num_cpus": self.num_cpus, "num_gpus": self.num_gpus}
        if self.group is not None:
            options["scheduling_strategy"] = PlacementGroupSchedulingStrategy(self.group, self.bundle)
        return options


def resources(device: str, share: float) -> dict[str, float]:
    """Return what Ray is asked for, for `share` devices, rounded down to what Ray can count."""
    cpus = {"CPU": _countable(CPUS_PER_DEVICE * share)}
    return cpus | {"GPU": _countable(share)} if device == "cuda" else cpus


def reserve(placement: Placement, timeout_s: float) -> dict[str, list[Slot]]:
    """Reserve devices, and return the slots of each role, rank by rank, neighbours on one node.

    Raises:
        RunError: the cluster does not have the devices, or others hold them for longer than `timeout_s`.
    """
    import ray
    from ray.util import placement_group, remove_placement_group

    _check_size(placement, [node["Resources"] for node in ray.nodes() if node["Alive"]])
    groups = []
    for pool in placement.pools:
        role = pool.roles[0]
        groups.append(placement_group([resources(placement.device, role.devices_per_actor)] * role.num_actors, "PACK"))
    for pool, group in zip(placement.pools, groups, strict=True):
        if not group.wait(timeout_s):
            for reserved in groups:
                remove_placement_group(reserved)
            raise RunError(
                f"no devices for {pool.name} within {timeout_s:g} s (launch.timeout_s): "
                f"it needs {_need(placement, pool)}, free now: {_have(placement, [ray.available_resources()])}"
            )
    return {
        role.name: _slots(placement.device, pool, role, group)
        for pool, group in zip(placement.pools, groups, strict=True)
        for role in pool.roles
    }


def _slots(device: str, pool: Pool, role: Role, group: PlacementGroup) -> list[Slot]:
    from ray.util import placement_group_table

    node_of = placement_group_table(group)["bundles_to_node_id"]
    order = sorted(node_of, key=lambda bundle: (node_of[bundle], bundle))
    share = resources(device, pool.share * role.devices_per_actor)
    return [Slot(share["CPU"], share.get("GPU", 0.0), group, bundle) for bundle in order]


def _check_size(placement: Placement, nodes: list[dict[str, float]]) -> None:
    """Refuse a placement that even an empty cluster could not hold: Ray would wait for it for ever, without a word."""
    unit, need = _unit(placement), resources(placement.device, placement.num_devices)[_unit(placement)]
    if need > sum(node.get(unit, 0.0) for node in nodes) + 1e-9:
        pools = "; ".join(placement.lines())
        remedy = (
            "fewer ranks or engines, or train.colocate_all=true"
            if unit == "GPU"
            else "fewer ranks, or a larger launch.num_cpus"
        )
        raise RunError(
            f"the run needs {_need(placement)}, the cluster has {_have(placement, nodes)} ({pools}): {remedy}"
        )
    for pool in placement.pools:
        wide = pool.roles[0].devices_per_actor
        if resources(placement.device, wide)[unit] > max(node.get(unit, 0.0) for node in nodes) + 1e-9:
            raise RunError(
                f"each {pool.name} needs {wide} GPUs on one node, and no node has them: lower vllm.tensor_parallel_size"
            )


def _unit(placement: Placement) -> str:
    return "GPU" if placement.device == "cuda" else "CPU"


def _need(placement: Placement, pool: Pool | None = None) -> str:
    count = placement.num_devices if pool is None else pool.num_devices
    return f"{resources(placement.device, count)[_unit(placement)]:g} {_unit(placement)}s"


def _have(placement: Placement, nodes: list[dict[str, float]]) -> str:
    return f"{sum(node.get(_unit(placement), 0.0) for node in nodes):g}"


def _countable(amount: float) -> float:
    return math.floor(amount * RESOURCE_STEPS + 1e-6) / RESOURCE_STEPS
