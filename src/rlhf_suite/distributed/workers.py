"""A worker group: one Ray actor per rank of a plain class, called together.

SFT with several ranks and every role of PPO run in groups of this one class, on CPU cores and on GPUs alike.
Creating a group does not wait, so several come up at once:

    policy = WorkerGroup(PolicyRole, "actor", policy_slots, options, args=(model, settings))
    critic = WorkerGroup(CriticRole, "critic", critic_slots, options, args=(model, settings))
    policy.ready(), critic.ready()

A handle (`group.ModelGroup`) gives the calls of a group types.
"""

from __future__ import annotations

import faulthandler
import gc
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import ray

from rlhf_suite.distributed.mesh import Mesh, Rank
from rlhf_suite.launch.actor_log import Member, redirect_output
from rlhf_suite.launch.allocator import allocator_env
from rlhf_suite.launch.placement import Slot, show_own_gpus
from rlhf_suite.launch.signs import show_signs
from rlhf_suite.launch.wait import wait_for


@dataclass(frozen=True)
class GroupOptions:
    """What all groups of a run share. `device` is "cpu" or "cuda"; `env` reaches the actors before any import; so many
    ranks split the tokens of each batch (`sequence`), and so many the matrices of a model (`tensor`). Where devices are
    shared, ranks give back memory after each call (`shares_devices`)."""

    device: str
    log_dir: Path
    timeout_s: float
    env: dict[str, str] = field(default_factory=dict)
    sequence: int = 1
    tensor: int = 1
    shares_devices: bool = False


class WorkerGroup:
    """`len(slots)` actors; rank i runs `cls(Rank(i, ...), *args)` in `slots[i]`."""

    def __init__(
        self, cls: type, name: str, slots: Sequence[Slot], options: GroupOptions, args: tuple[Any, ...] = ()
    ) -> None:
        self.name = name
        shared = options.sequence * options.tensor
        self.mesh = Mesh(len(slots) // shared, options.sequence, options.tensor)
        assert self.mesh.size == len(slots), (self.mesh, len(slots))
        self.members: Sequence[Member] = [
            Member(f"{name}-{i}", options.log_dir / f"{name}-{i}.log") for i in range(len(slots))
        ]
        self._is_ready = False
        self._timeout_s = options.timeout_s
        self._actors = [
            ray.remote(_Host)
            .options(**slot.options(), runtime_env={"env_vars": options.env | allocator_env(options.device)})
            .remote(str(member.log.absolute()), options.timeout_s, options.device == "cuda" and options.shares_devices)
            for slot, member in zip(slots, self.members, strict=True)
        ]
        address = self._actors[0].open_store.remote()  # resolved by Ray on its way to the ranks
        self._built = [
            actor.build.remote(cls, i, self.mesh, address, options.device, *args)
            for i, actor in enumerate(self._actors)
        ]

    def ready(self) -> None:
        """Wait until every rank's constructor is done; the first wait for results does it too."""
        if not self._is_ready:
            wait_for(self._built, f"the start of {self.name}", self._timeout_s, self.members)
            self._is_ready = True

    def start(self, method: str, *args: Any) -> list[ray.ObjectRef]:
        """Call `method` on every rank with the same arguments and do not wait; `wait` gives the results.

        An argument that is an ObjectRef arrives as its value: `ray.put` large ones once.
        """
        return [actor.run.remote(method, *args) for actor in self._actors]

    def start_sharded(self, method: str, shards: Sequence[Any], *args: Any) -> list[ray.ObjectRef]:
        """Do as `start` does, but the first argument of a rank is the shard of its place on the data axis."""
        assert len(shards) == self.mesh.data, (len(shards), self.mesh)
        stored = [ray.put(shard) for shard in shards]  # once for all ranks that share it
        mine = [stored[self.mesh.data_index(rank)] for rank in range(self.mesh.size)]
        return [actor.run.remote(method, shard, *args) for actor, shard in zip(self._actors, mine, strict=True)]

    def wait(self, refs: Sequence[ray.ObjectRef], activity: str) -> list[Any]:
        """Return the results of `start` or `start_sharded`, one per rank, within the deadline of the run."""
        self.ready()
        return wait_for(refs, activity, self._timeout_s, self.members)

    def kill(self) -> None:
        """End all ranks at once, whatever they are doing."""
        for actor in self._actors:
            ray.kill(actor)


class _Host:
    """The Ray actor of one rank. It holds the worker, so that an error of a constructor is an ordinary error of a call.

    Shortly before the deadline of a call passes it writes the stacks of all its threads to the log.
    """

    def __init__(self, log: str, timeout_s: float, frees_memory: bool) -> None:
        redirect_output(Path(log))
        self._frees_memory = frees_memory
        show_own_gpus()
        self._dump_after_s, self._is_busy, self._lock = 0.9 * timeout_s, False, threading.Lock()
        show_signs(log, self._put_off)

    def open_store(self) -> tuple[str, int]:
        """Open a rendezvous store in this process and return its address, where the group meets. It listens from now
        on: another program could take a port that is only known to be free."""
        from rlhf_suite.distributed.world import open_store

        address = ray.util.get_node_ip_address()
        self._store = open_store(address)
        return address, self._store.port

    def build(self, cls: type, number: int, mesh: Mesh, address: tuple[str, int], device: str, *args: Any) -> None:
        self._worker = self._watch(cls, Rank(number, mesh, *address, device), *args)

    def run(self, method: str, *args: Any) -> Any:
        return self._watch(getattr(self._worker, method), *args)

    def _watch(self, function: Any, *args: Any) -> Any:
        self._is_busy = True
        self._put_off()
        try:
            result = function(*args)
            if self._frees_memory:
                free_unused_memory()
            return result
        finally:
            with self._lock:
                self._is_busy = False
                faulthandler.cancel_dump_traceback_later()

    def _put_off(self) -> None:
        """Write the stacks later: a call has just begun, or shown a sign of life."""
        with self._lock:
            if self._is_busy:
                faulthandler.dump_traceback_later(self._dump_after_s, file=2)


def free_unused_memory() -> None:
    """Give the memory that torch holds for later back to the GPU, for the other processes there: an engine that wakes
    takes its memory from the driver, and torch would never give back the peak of a phase."""
    import torch

    gc.collect()  # what only cycles of references hold is memory in use for torch
    torch.cuda.empty_cache()
