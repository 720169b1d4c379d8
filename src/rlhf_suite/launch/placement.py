"""Devices for actors: a plan says which roles share which devices, `reserve` gets them from Ray, within a deadline.

A device is a GPU, or on a machine without one a small share of the CPU: the same plan runs on both.
Pools do not overlap. Roles in one pool share its devices: actor i of each role sits on device i.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rlhf_suite.errors import RunError

if TYPE_CHECKING:
    from ray.util.placement_group import PlacementGroup

# Small, so that tens of actors fit on a few cores: on a CPU they take turns anyway, and on a GPU cores are plenty.
CPUS_PER_DEVICE = 0.25
RESOURCE_STEPS = 10_000  # Ray counts resources in ten-thousandths


@dataclass(frozen=True)
class Role:
    """A kind of actor: how many of them, and how many devices each one drives by itself (tensor parallel engines)."""

    name: str
    num_actors: int
    devices_per_actor: int = 1


@dataclass(frozen=True)
class Pool:
    """Devices and the roles that run on them. All roles of a pool have the same number and size of actors."""

    roles: tuple[Role, ...]

    @property
    def name(self) -> str:
        return "+".join(role.name for role in self.roles)

    @property
    def num_devices(self) -> int:
        return self.roles[0].num_actors * self.roles[0].devices_per_actor

    @property
    def share(self) -> float:
        """The part of a device that one actor takes."""
        return 1 / len(self.roles)


@dataclass(frozen=True)
class Plan:
    """Where everything runs."""

    device: str
    pools: tuple[Pool, ...]

    @property
    def num_devices(self) -> int:
        return sum(pool.num_devices for pool in self.pools)

    @property
    def num_actors(self) -> int:
        return sum(role.num_actors for pool in self.pools for role in pool.roles)

    def lines(self) -> list[str]:
        """One line per pool, for people."""
        unit = "GPU" if self.device == "cuda" else "CPU slot"
        return [f"{pool.num_devices} x {unit}: " + ", ".join(_said(role) for role in pool.roles) for pool in self.pools]


@dataclass(frozen=True)
class Slot:
    """Where one actor runs: a bundle of a placement group, or anywhere, and what it takes of it."""

    num_cpus: float
    num_gpus: float = 0.0
    group: PlacementGroup | None = None
    bundle: int = -1

    def options(self) -> dict[str, Any]:
        """Keyword arguments for `ray.remote(cls).options(...)`."""
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        options: dict[str, Any] = {"num_cpus": self.num_cpus, "num_gpus": self.num_gpus}
        if self.group is not None:
            options["scheduling_strategy"] = PlacementGroupSchedulingStrategy(self.group, self.bundle)
        return options


def resources(device: str, share: float) -> dict[str, float]:
    """What Ray is asked for, for `share` devices (rounded down to what Ray can count)."""
    cpus = {"CPU": _countable(CPUS_PER_DEVICE * share)}
    return cpus | {"GPU": _countable(share)} if device == "cuda" else cpus


def reserve(plan: Plan, timeout_s: float) -> dict[str, list[Slot]]:
    """Reserve the plan's devices: the slots of each role, rank by rank, neighbours on one node.

    Raises:
        RunError: the cluster does not have the devices, or others hold them for longer than `timeout_s`.
    """
    import ray
    from ray.util import placement_group, remove_placement_group

    _check_size(plan, [node["Resources"] for node in ray.nodes() if node["Alive"]])
    groups = []
    for pool in plan.pools:
        role = pool.roles[0]
        groups.append(placement_group([resources(plan.device, role.devices_per_actor)] * role.num_actors, "PACK"))
    for pool, group in zip(plan.pools, groups, strict=True):
        if not group.wait(timeout_s):
            for reserved in groups:
                remove_placement_group(reserved)
            raise RunError(
                f"no devices for {pool.name} within {timeout_s:g} s (launch.timeout_s): it needs {_need(plan, pool)}, "
                f"free now: {_have(plan, [ray.available_resources()])}"
            )
    return {
        role.name: _slots(plan.device, pool, role, group)
        for pool, group in zip(plan.pools, groups, strict=True)
        for role in pool.roles
    }


def _slots(device: str, pool: Pool, role: Role, group: PlacementGroup) -> list[Slot]:
    from ray.util import placement_group_table

    node_of = placement_group_table(group)["bundles_to_node_id"]
    order = sorted(node_of, key=lambda bundle: (node_of[bundle], bundle))
    share = resources(device, pool.share * role.devices_per_actor)
    return [Slot(share["CPU"], share.get("GPU", 0.0), group, bundle) for bundle in order]


def _check_size(plan: Plan, nodes: list[dict[str, float]]) -> None:
    """That the cluster, if it were empty, could hold the plan: otherwise Ray waits for ever without a word."""
    unit, need = _unit(plan), resources(plan.device, plan.num_devices)[_unit(plan)]
    if need > sum(node.get(unit, 0.0) for node in nodes) + 1e-9:
        pools = "; ".join(plan.lines())
        remedy = (
            "fewer ranks or engines, or train.colocate_all=true"
            if unit == "GPU"
            else "fewer ranks, or a larger launch.num_cpus"
        )
        raise RunError(f"the run needs {_need(plan)}, the cluster has {_have(plan, nodes)} ({pools}): {remedy}")
    for pool in plan.pools:
        wide = pool.roles[0].devices_per_actor
        if resources(plan.device, wide)[unit] > max(node.get(unit, 0.0) for node in nodes) + 1e-9:
            raise RunError(
                f"each {pool.name} needs {wide} GPUs on one node, and no node has them: lower vllm.tensor_parallel_size"
            )


def _unit(plan: Plan) -> str:
    return "GPU" if plan.device == "cuda" else "CPU"


def _need(plan: Plan, pool: Pool | None = None) -> str:
    count = plan.num_devices if pool is None else pool.num_devices
    return f"{resources(plan.device, count)[_unit(plan)]:g} {_unit(plan)}s"


def _have(plan: Plan, nodes: list[dict[str, float]]) -> str:
    return f"{sum(node.get(_unit(plan), 0.0) for node in nodes):g}"


def _said(role: Role) -> str:
    each = f" of {role.devices_per_actor}" if role.devices_per_actor > 1 else ""
    return f"{role.name} x {role.num_actors}{each}"


def _countable(amount: float) -> float:
    return math.floor(amount * RESOURCE_STEPS + 1e-6) / RESOURCE_STEPS
