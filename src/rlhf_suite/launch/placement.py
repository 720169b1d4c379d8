"""Devices for actors: `reserve` gets those of a placement (`config.plan`) from Ray, within a deadline.

A device is a GPU, or on a machine without one a small share of the CPU: the same placement runs on both.
Roles in one pool share its devices: actor i of each role sits on device i. An engine that is split over w devices sits
on devices i * w and following. On one node Ray gives it a share of the first one, and it is told the names of all. An
engine with more devices than a node has a worker actor on each of them, to which Ray gives its share.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
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
    gpus: tuple[str, ...] = ()  # those that the actor uses, by their names on its node; (): those that Ray gives it
    workers: tuple[Slot, ...] = ()  # of an engine on several nodes, which takes nothing itself

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
        RunError: the cluster does not have the devices, or others hold them for longer than `timeout_s`; or the devices
        of an engine that one node could hold are on two.
    """
    import ray
    from ray.util import placement_group, remove_placement_group

    nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    _check_size(placement, nodes)
    sizes = [_bundle(placement.device, pool, nodes) for pool in placement.pools]
    groups = [
        placement_group([resources(placement.device, size)] * (pool.num_devices // size), "PACK")
        for pool, size in zip(placement.pools, sizes, strict=True)
    ]
    for pool, group in zip(placement.pools, groups, strict=True):
        if not group.wait(timeout_s):
            for reserved in groups:
                remove_placement_group(reserved)
            raise RunError(
                f"no devices for {pool.name} within {timeout_s:g} s (launch.timeout_s): "
                f"it needs {_need(placement, pool)}, free now: {_have(placement, [ray.available_resources()])}"
            )
    return {
        role.name: _slots(placement.device, pool, role, size, group, timeout_s)
        for pool, size, group in zip(placement.pools, sizes, groups, strict=True)
        for role in pool.roles
    }


def _bundle(device: str, pool: Pool, nodes: list[dict[str, float]]) -> int:
    """Return how many devices of a pool are reserved as one, and so on one node: those of its smallest actor, or 1
    where no node has so many."""
    unit = _unit(device)
    fits = resources(device, pool.bundle)[unit] <= max(node.get(unit, 0.0) for node in nodes) + 1e-9
    return pool.bundle if fits else 1


def _slots(device: str, pool: Pool, role: Role, size: int, group: PlacementGroup, timeout_s: float) -> list[Slot]:
    """Return the slots of a role, one for each of its actors, in bundles of `size` devices."""
    from ray.util import placement_group_table

    node_of = placement_group_table(group)["bundles_to_node_id"]
    order = sorted(node_of, key=lambda bundle: (node_of[bundle], bundle))
    share = resources(device, pool.share * size)
    slots = [Slot(share["CPU"], share.get("GPU", 0.0), group, bundle) for bundle in order]
    wide = role.devices_per_actor // size
    if wide == 1:
        return slots
    if device == "cuda":
        slots = [replace(s, gpus=(name,)) for s, name in zip(slots, _gpu_names(slots, timeout_s), strict=True)]
    return [_wide_slot(pool, slots[i : i + wide], node_of) for i in range(0, len(slots), wide)]


def _wide_slot(pool: Pool, slots: Sequence[Slot], node_of: Mapping[int, str]) -> Slot:
    """Return the slot of an engine with a device of each of `slots`, each of which has the name of its GPU."""
    gpus = dict[str, tuple[str, ...]]()
    for slot in slots:
        node = node_of[slot.bundle]
        gpus[node] = gpus.get(node, ()) + slot.gpus
    first, here = slots[0], gpus[node_of[slots[0].bundle]]
    if len(gpus) == 1:
        return replace(first, gpus=here)
    per_node = Counter(node_of.values())
    if len(slots) <= max(per_node.values()):
        raise RunError(
            f"the {len(slots)} devices of an engine would be on two nodes, and wait for their network: "
            f"{pool.name} got {', '.join(map(str, per_node.values()))} devices of the nodes. Make the devices of "
            "each node a multiple of vllm.tensor_parallel_size x vllm.pipeline_parallel_size"
        )
    workers = tuple(replace(slot, gpus=gpus[node_of[slot.bundle]]) for slot in slots)
    return replace(first, num_cpus=0.0, num_gpus=0.0, gpus=here, workers=workers)


def _gpu_names(slots: Sequence[Slot], timeout_s: float) -> list[str]:
    """Return the name of the GPU of each slot, which only a process in it is told."""
    import ray

    ask = ray.remote(_own_gpu)
    asked = [ask.options(**slot.options()).remote() for slot in slots]
    try:
        return ray.get(asked, timeout=timeout_s)
    except ray.exceptions.GetTimeoutError:
        raise RunError(f"Ray did not say within {timeout_s:g} s (launch.timeout_s) which GPUs are reserved") from None


def _own_gpu() -> str:
    import ray

    (gpu,) = ray.get_gpu_ids()
    return str(gpu)


def _check_size(placement: Placement, nodes: list[dict[str, float]]) -> None:
    """Refuse a placement that even an empty cluster could not hold: Ray would wait for it for ever, without a word."""
    unit, need = _unit(placement.device), resources(placement.device, placement.num_devices)[_unit(placement.device)]
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


def _unit(device: str) -> str:
    return "GPU" if device == "cuda" else "CPU"


def _need(placement: Placement, pool: Pool | None = None) -> str:
    count = placement.num_devices if pool is None else pool.num_devices
    return f"{resources(placement.device, count)[_unit(placement.device)]:g} {_unit(placement.device)}s"


def _have(placement: Placement, nodes: list[dict[str, float]]) -> str:
    return f"{sum(node.get(_unit(placement.device), 0.0) for node in nodes):g}"


def _countable(amount: float) -> float:
    return math.floor(amount * RESOURCE_STEPS + 1e-6) / RESOURCE_STEPS
