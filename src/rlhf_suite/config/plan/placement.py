"""Which kinds of actors of a run share which devices."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True)
class Role:
    """A kind of actor: how many of them, how many devices each one drives by itself (engines that are split), and on
    how many nodes there are equally many of them (None: wherever there are devices)."""

    name: str
    num_actors: int
    devices_per_actor: int = 1
    num_nodes: int | None = None

    @property
    def num_devices(self) -> int:
        return self.num_actors * self.devices_per_actor


@dataclass(frozen=True)
class Pool:
    """Devices and the roles that run on them. Each role of a pool takes a share of all of its devices."""

    roles: tuple[Role, ...]

    def __post_init__(self) -> None:
        assert len({role.num_devices for role in self.roles}) == 1, self.roles
        assert len(nodes_of(self.roles)) <= 1, self.roles

    @property
    def name(self) -> str:
        return "+".join(role.name for role in self.roles)

    @property
    def num_devices(self) -> int:
        return self.roles[0].num_devices

    @property
    def num_nodes(self) -> int | None:
        """Return over how many nodes the devices are spread evenly; None: wherever there are any."""
        return next(iter(nodes_of(self.roles)), None)

    @property
    def bundle(self) -> int:
        """Return how many devices are reserved as one: those of the smallest actor."""
        return min(role.devices_per_actor for role in self.roles)

    @property
    def share(self) -> float:
        """Return the part of a device that one actor takes."""
        return 1 / len(self.roles)


@dataclass(frozen=True)
class Placement:
    """Which roles run on which devices. Pools do not overlap."""

    device: str
    pools: tuple[Pool, ...]
    sequence: int = 1  # ranks of a model that split the tokens of each batch
    tensor: int = 1  # ranks of a model that split the matrices of its layers

    @property
    def num_devices(self) -> int:
        return sum(pool.num_devices for pool in self.pools)

    @property
    def num_actors(self) -> int:
        return sum(role.num_actors for pool in self.pools for role in pool.roles)

    def lines(self) -> list[str]:
        """Return one line per pool, for people."""
        unit = "GPU" if self.device == "cuda" else "CPU slot"
        shared = f"; {self.sequence} ranks split the tokens of a batch" if self.sequence > 1 else ""
        shared += f"; {self.tensor} ranks split the matrices of a model" if self.tensor > 1 else ""
        return [
            f"{pool.num_devices} x {unit}{spread(pool)}: " + ", ".join(map(describe_role, pool.roles)) + shared
            for pool in self.pools
        ]


def nodes_of(roles: Iterable[Role]) -> set[int]:
    """Return the numbers of nodes that roles ask for."""
    return {role.num_nodes for role in roles if role.num_nodes is not None}


def spread(pool: Pool) -> str:
    return f" on {pool.num_nodes} nodes" if (pool.num_nodes or 1) > 1 else ""


def describe_role(role: Role) -> str:
    devices = f" of {role.devices_per_actor}" if role.devices_per_actor > 1 else ""
    return f"{role.name} x {role.num_actors}{devices}"
