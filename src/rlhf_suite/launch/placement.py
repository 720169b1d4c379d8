"""Devices for actors: `reserve` gets those of a placement (`config/plan`) from Ray, within a deadline.

A device is a GPU, or on a machine without one a small share of the CPU: the same placement runs on both.
Roles in one pool share its devices: actor i of each role sits on device i. An engine that is split over w devices sits
on devices i * w and following. On one node Ray gives it a share of the first one, and it is told the names of all. An
engine with more devices than a node has a worker actor on each of them, to which Ray gives its share.
"""

from __future__ import annotations

import math
import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from rlhf_suite.config.plan.placement import Placement, Pool, Role
from rlhf_suite.errors import RunError

if TYPE_CHECKING:
    from ray.util.placement_group import PlacementGroup

# Small, so that tens of actors fit on a few cores: on a CPU they take turns anyway, and on a GPU cores are plenty.
CPUS_PER_DEVICE = 0.25
NODE_ID = "ray.io/node-id"  # the label that Ray gives each node
NOSET = "RAY_EXPERIMENTAL_NOSET_"
GPU_VARIABLES = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES")
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
    from ray.util import remove_placement_group

    nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    _check_size(placement, nodes)
    sizes = [_bundle(placement.device, pool, nodes) for pool in placement.pools]
    held: list[PlacementGroup] = []
    try:
        places = [
            _places(placement, pool, size, held, timeout_s) for pool, size in zip(placement.pools, sizes, strict=True)
        ]
        return {
            role.name: _slots(placement.device, pool, role, size, pool_places, timeout_s)
            for pool, size, pool_places in zip(placement.pools, sizes, places, strict=True)
            for role in pool.roles
        }
    except RunError:
        for group in held:
            remove_placement_group(group)
        raise


@dataclass(frozen=True)
class _Place:
    """A reserved bundle, and the id of its node."""

    group: PlacementGroup
    bundle: int
    node: str


def _places(placement: Placement, pool: Pool, size: int, held: list[PlacementGroup], timeout_s: float) -> list[_Place]:
    """Reserve the devices of a pool in bundles of `size` and return them node by node; `held` gets what was reserved,
    also in vain.

    A pool that is spread over nodes gets a group of bundles on each, the next on a node that the earlier are not on.
    """
    import ray
    from ray.util import placement_group, placement_group_table

    strategy = "PACK" if pool.num_nodes is None else "STRICT_PACK"
    reserved = list[_Place]()
    num_bundles = pool.num_devices // size // (pool.num_nodes or 1)
    for _ in range(pool.num_nodes or 1):
        bundles = [resources(placement.device, size)] * num_bundles
        taken = sorted({place.node for place in reserved})
        elsewhere = [{NODE_ID: f"!in({','.join(taken)})"}] * num_bundles if taken else None
        group = placement_group(bundles, strategy, bundle_label_selector=elsewhere)
        held.append(group)
        if not group.wait(timeout_s):
            raise RunError(
                f"Ray has not reserved the devices of {pool.name} within {timeout_s:g} s (launch.timeout_s): it needs "
                f"{_need(placement, pool)}, and {_have(placement, [ray.available_resources()])} are free now. Wait for "
                "the end of other runs on this cluster, or raise launch.timeout_s"
            )
        node_of = placement_group_table(group)["bundles_to_node_id"]
        reserved += [
            _Place(group, bundle, node) for node, bundle in sorted((node, index) for index, node in node_of.items())
        ]
    return reserved


def _bundle(device: str, pool: Pool, nodes: list[dict[str, float]]) -> int:
    """Return how many devices of a pool are reserved as one, and so on one node: those of its smallest actor, or 1
    where no node has so many."""
    unit = _unit(device)
    fits = resources(device, pool.bundle)[unit] <= max(node.get(unit, 0.0) for node in nodes) + 1e-9
    return pool.bundle if fits else 1


def _slots(device: str, pool: Pool, role: Role, size: int, places: Sequence[_Place], timeout_s: float) -> list[Slot]:
    """Return the slots of a role, one for each of its actors, in bundles of `size` devices."""
    share = resources(device, pool.share * size)
    slots = [Slot(share["CPU"], share.get("GPU", 0.0), place.group, place.bundle) for place in places]
    wide = role.devices_per_actor // size
    if wide == 1:
        return slots
    if device == "cuda":
        slots = [replace(s, gpus=(name,)) for s, name in zip(slots, _gpu_names(slots, timeout_s), strict=True)]
    nodes = [place.node for place in places]
    return [_wide_slot(pool, slots[i : i + wide], nodes[i : i + wide], nodes) for i in range(0, len(slots), wide)]


def _wide_slot(pool: Pool, slots: Sequence[Slot], nodes: Sequence[str], all_nodes: Sequence[str]) -> Slot:
    """Return the slot of an engine with a device of each of `slots`, which are on `nodes` and have the names of their
    GPUs. `all_nodes`: those of each device of the pool."""
    gpus = dict[str, tuple[str, ...]]()
    for slot, node in zip(slots, nodes, strict=True):
        gpus[node] = gpus.get(node, ()) + slot.gpus
    first, here = slots[0], gpus[nodes[0]]
    if len(gpus) == 1:
        return replace(first, gpus=here)
    per_node = Counter(all_nodes)
    if len(slots) <= max(per_node.values()):
        raise RunError(
            f"the {len(slots)} devices of an engine would be on two nodes, and wait for their network: "
            f"{pool.name} got {', '.join(map(str, per_node.values()))} devices of the nodes. Make the devices of "
            "each node a multiple of vllm.tensor_parallel_size x vllm.pipeline_parallel_size"
        )
    workers = tuple(replace(slot, gpus=gpus[node]) for slot, node in zip(slots, nodes, strict=True))
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


def show_own_gpus(gpus: Sequence[str] = ()) -> None:
    """Have this actor see the GPUs that it uses: `gpus`, or (none given) those that Ray gives it. To be called before
    anything looks for GPUs.

    Ray does the latter itself, unless RAY_EXPERIMENTAL_NOSET_<variable> tells it to leave the variable alone, as some
    clusters do. Then all actors of a node would use its first GPU.
    """
    import ray

    left = [name for name in GPU_VARIABLES if os.environ.get(f"{NOSET}{name}", "0").lower() in ("1", "true")]
    own = gpus or (ray.get_gpu_ids() if left else ())
    for name in (left or GPU_VARIABLES[:1]) if own else ():
        os.environ[name] = ",".join(map(str, own))


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
            "use fewer ranks or engines, or write train.colocate_all=true"
            if unit == "GPU"
            else "use fewer ranks, or write a larger launch.num_cpus"
        )
        raise RunError(
            f"the run needs {_need(placement)}, the cluster has {_have(placement, nodes)} ({pools}); {remedy}"
        )
    for pool in placement.pools:
        _check_nodes(placement, pool, [node.get(unit, 0.0) for node in nodes])


def _check_nodes(placement: Placement, pool: Pool, each_has: list[float]) -> None:
    """Refuse a pool that is spread over more nodes than have enough devices."""
    if pool.num_nodes is None:
        return
    unit = _unit(placement.device)
    need = resources(placement.device, pool.num_devices / pool.num_nodes)[unit]
    able = sum(count + 1e-9 >= need for count in each_has)
    if able < pool.num_nodes:
        raise RunError(
            f"{pool.name} needs {need:g} {unit}s on each of {pool.num_nodes} nodes, as num_nodes and num_gpus_per_node "
            f"say, and {able} of the cluster's {len(each_has)} nodes have them: change these flags, or give the run "
            "more nodes (hydra.launcher.nodes, or launch.ray_address of a larger cluster)"
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
