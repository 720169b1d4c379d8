"""The ranks of one model, called together: the protocol, and the group of one worker in this process."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from rlhf_suite.distributed.workers import LOOPBACK, Worker
from rlhf_suite.distributed.world import open_store


class Group(Protocol):
    """What drives the ranks of a model; `WorkerGroup` does it over Ray."""

    name: str
    world_size: int

    def call(self, method: str, *args: Any, what: str | None = None) -> list[Any]:
        """`method` of every rank with the same arguments: the list of results. `what` names the wait in errors."""
        ...

    def call_sharded(self, method: str, shards: Sequence[Any], *args: Any, what: str | None = None) -> list[Any]:
        """As `call`, but rank i gets `shards[i]` as its first argument."""
        ...


class LocalGroup:
    """Rank 0 of 1 in this process: no Ray, so a debugger works and nothing has to start."""

    world_size = 1

    def __init__(self, cls: type[Worker], name: str, device: str, args: tuple[Any, ...]) -> None:
        self.name = name
        self._store = open_store(LOOPBACK)
        self._worker = cls(0, 1, LOOPBACK, self._store.port, device, *args)

    def call(self, method: str, *args: Any, what: str | None = None) -> list[Any]:
        """`method` of the worker, as a list of one; there is nothing to wait for."""
        return [getattr(self._worker, method)(*args)]

    def call_sharded(self, method: str, shards: Sequence[Any], *args: Any, what: str | None = None) -> list[Any]:
        """The same with the only shard."""
        return self.call(method, shards[0], *args)
