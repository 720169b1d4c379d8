"""The ranks of one model, called together: the protocol, typed handles on it, and one rank in this process.

Nothing here needs Ray, over which `workers` calls several ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

from rlhf_suite.distributed.mesh import Mesh, Rank
from rlhf_suite.distributed.worker import Worker
from rlhf_suite.distributed.world import open_store
from rlhf_suite.launch.actor_log import Member
from rlhf_suite.launch.address import LOOPBACK

T = TypeVar("T")


class Group(Protocol):
    """What calls methods of a model's ranks by name; `WorkerGroup` does it over Ray."""

    name: str
    mesh: Mesh
    members: Sequence[Member]  # how errors name the ranks

    def ready(self) -> None:
        """Wait until every rank is up."""
        ...

    def start(self, method: str, *args: Any) -> Sequence[Any]:
        """Call `method` of every rank with the same arguments and do not wait; `wait` gives the results."""
        ...

    def start_sharded(self, method: str, shards: Sequence[Any], *args: Any) -> Sequence[Any]:
        """Do as `start` does, but the first argument of a rank is the shard of its place on the data axis."""
        ...

    def wait(self, refs: Sequence[Any], activity: str) -> list[Any]:
        """Return the results of started calls, one per rank. Errors name the wait by `activity`."""
        ...


@dataclass(frozen=True)
class Pending(Generic[T]):
    """A call that the ranks of a model are working on."""

    group: Group
    refs: Sequence[Any]  # one per rank
    activity: str  # the name of the wait for it
    combine: Callable[[list[Any]], T]  # the answers of all ranks to the answer of the model

    def result(self) -> T:
        """Wait for every rank and return the answer of the model."""
        return self.combine(self.group.wait(self.refs, self.activity))


class ModelGroup:
    """A handle on the ranks of a model. Subclasses have a typed method for each call that their workers answer."""

    def __init__(self, group: Group) -> None:
        self.group = group

    @property
    def name(self) -> str:
        return self.group.name

    def ready(self) -> None:
        """Wait until every rank is up."""
        self.group.ready()

    def submit(self, method: str, *args: Any, activity: str) -> Pending[Any]:
        """Call `method` of every rank with the same arguments; the answer is that of the first rank."""
        return Pending(
            self.group, self.group.start(method, *args), f"{self.name}: {activity}", lambda answers: answers[0]
        )


class LocalGroup:
    """Rank 0 of 1 in this process: no Ray, so a debugger works and nothing has to start. A started call is done."""

    def __init__(self, cls: type[Worker], name: str, device: str, args: tuple[Any, ...]) -> None:
        self.name, self.mesh = name, Mesh(data=1)
        self.members: Sequence[Member] = ()
        self._store = open_store(LOOPBACK)
        self._worker = cls(Rank(0, self.mesh, LOOPBACK, self._store.port, device), *args)

    def ready(self) -> None:
        """Return at once: the worker is built."""

    def start(self, method: str, *args: Any) -> list[Any]:
        return [getattr(self._worker, method)(*args)]

    def start_sharded(self, method: str, shards: Sequence[Any], *args: Any) -> list[Any]:
        return self.start(method, shards[0], *args)

    def wait(self, refs: Sequence[Any], activity: str) -> list[Any]:
        return list(refs)
