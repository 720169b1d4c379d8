"""A worker group: one Ray actor per rank of a plain class, called together.

SFT with several ranks and every role of PPO run in groups of this one class, on CPU cores and on GPUs alike.
Creating a group does not wait, so several come up at once:

    policy = WorkerGroup(PolicyWorker, "actor", policy_slots, options, args=(config,))
    critic = WorkerGroup(CriticWorker, "critic", critic_slots, options, args=(config,))
    policy.ready(), critic.ready()
    metrics = policy.call("update", step, what="the policy update of step 3")
"""

from __future__ import annotations

import faulthandler
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import ray

from rlhf_suite.launch.actor_log import Member, redirect_output
from rlhf_suite.launch.placement import Slot
from rlhf_suite.launch.wait import wait_for

LOOPBACK = "127.0.0.1"


@dataclass(frozen=True)
class GroupOptions:
    """What all groups of a run share. `device` is "cpu" or "cuda"; `env` reaches the actors before any import."""

    device: str
    log_dir: Path
    timeout_s: float
    env: dict[str, str] = field(default_factory=dict)


class Worker:
    """Base of the classes that run in a group: knows its rank, and how to meet its peers.

    The environment that torch.distributed and DeepSpeed read is set before a subclass's own `__init__` goes on.
    Ray shows each actor its own device only, so the local rank is always 0.
    """

    def __init__(self, rank: int, world_size: int, master_addr: str, master_port: int, device: str) -> None:
        self.rank = rank
        self.world_size = world_size
        self.device = device
        if master_addr == LOOPBACK:
            os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # a group that meets there stays there
        os.environ.update(
            TORCHELASTIC_USE_AGENT_STORE="True",  # torch joins the store at that address and starts none of its own
            RANK=str(rank),
            WORLD_SIZE=str(world_size),
            LOCAL_RANK="0",
            LOCAL_WORLD_SIZE="1",
            MASTER_ADDR=master_addr,
            MASTER_PORT=str(master_port),
        )


class WorkerGroup:
    """`len(slots)` actors; rank i runs `cls(i, world_size, master_addr, master_port, device, *args)` in `slots[i]`."""

    def __init__(
        self, cls: type, name: str, slots: Sequence[Slot], options: GroupOptions, args: tuple[Any, ...] = ()
    ) -> None:
        self.name = name
        self.world_size = len(slots)
        self.members = [Member(f"{name}-{i}", options.log_dir / f"{name}-{i}.log") for i in range(len(slots))]
        self._is_ready = False
        self._timeout_s = options.timeout_s
        self._actors = [
            ray.remote(_Host)
            .options(**slot.options(), runtime_env={"env_vars": options.env})
            .remote(str(member.log.absolute()), options.timeout_s)
            for slot, member in zip(slots, self.members, strict=True)
        ]
        address = self._actors[0].open_store.remote()  # resolved by Ray on its way to the ranks
        self._built = [
            actor.build.remote(cls, i, self.world_size, address, options.device, *args)
            for i, actor in enumerate(self._actors)
        ]

    def ready(self) -> None:
        """Wait until every rank's constructor is done; the first wait for results does it too."""
        if not self._is_ready:
            wait_for(self._built, f"the start of {self.name}", self._timeout_s, self.members)
            self._is_ready = True

    def start(self, method: str, *args: Any, **kwargs: Any) -> list[ray.ObjectRef]:
        """Call `method` on every rank with the same arguments and do not wait; `wait` gives the results.

        An argument that is an ObjectRef arrives as its value: `ray.put` large ones once.
        """
        return [actor.run.remote(method, *args, **kwargs) for actor in self._actors]

    def start_sharded(self, method: str, shards: Sequence[Any], *args: Any) -> list[ray.ObjectRef]:
        """As `start`, but rank i gets `shards[i]` as its first argument."""
        return [actor.run.remote(method, shard, *args) for actor, shard in zip(self._actors, shards, strict=True)]

    def wait(self, refs: Sequence[ray.ObjectRef], what: str) -> list[Any]:
        """The results of `start` or `start_sharded`, one per rank, within the run's deadline."""
        self.ready()
        return wait_for(refs, what, self._timeout_s, self.members)

    def call(self, method: str, *args: Any, what: str | None = None, **kwargs: Any) -> list[Any]:
        """`method` of every rank with the same arguments: the list of results. `what` names the wait in errors."""
        self.ready()
        return self.wait(self.start(method, *args, **kwargs), what or f"{self.name}.{method}")

    def call_sharded(self, method: str, shards: Sequence[Any], *args: Any, what: str | None = None) -> list[Any]:
        """As `call`, but rank i gets `shards[i]` as its first argument."""
        self.ready()
        return self.wait(self.start_sharded(method, shards, *args), what or f"{self.name}.{method}")

    def kill(self) -> None:
        """End all ranks at once, whatever they are doing."""
        for actor in self._actors:
            ray.kill(actor)


class _Host:
    """The Ray actor of one rank. It holds the worker, so that a constructor's error is an ordinary error of a call.

    Shortly before the deadline of a call passes it writes the stacks of all its threads to the log.
    """

    def __init__(self, log: str, timeout_s: float) -> None:
        redirect_output(Path(log))
        self._dump_after_s = 0.9 * timeout_s

    def open_store(self) -> tuple[str, int]:
        """The address of a rendezvous store in this process, for the group to meet at. It listens from now on: a port
        that is only free now may be somebody else's when the group comes to use it."""
        from rlhf_suite.distributed.world import open_store

        address = ray.util.get_node_ip_address()
        self._store = open_store(address)
        return address, self._store.port

    def build(self, cls: type, rank: int, world_size: int, address: tuple[str, int], device: str, *args: Any) -> None:
        self._worker = self._watched(cls, rank, world_size, *address, device, *args)

    def run(self, method: str, *args: Any, **kwargs: Any) -> Any:
        return self._watched(getattr(self._worker, method), *args, **kwargs)

    def _watched(self, function: Any, *args: Any, **kwargs: Any) -> Any:
        faulthandler.dump_traceback_later(self._dump_after_s, file=2)
        try:
            return function(*args, **kwargs)
        finally:
            faulthandler.cancel_dump_traceback_later()
