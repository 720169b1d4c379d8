"""The driver's side of the rollout engines: requests go to one, weights to all, and every wait has a deadline."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import ray
from numpy.typing import NDArray

from rlhf_suite.engines.generation import EngineInfo, Generation, GenerationRequest
from rlhf_suite.launch.actor_log import Member
from rlhf_suite.launch.wait import first_done, wait_for
from rlhf_suite.weight_sync.digests import Manifest, SyncReport

# Backends whose sender and receivers work at the same time; with the others the engines follow the sender.
STREAMS = ("gloo", "nccl", "ipc")


class EnginePool:
    """Actors of `engines.actor.Engine`. members[i] is how errors name handles[i]."""

    def __init__(self, handles: Sequence[Any], members: Sequence[Member], timeout_s: float) -> None:
        self._handles, self._members, self._timeout_s = list(handles), list(members), timeout_s

    def __len__(self) -> int:
        return len(self._handles)

    def ready(self) -> list[EngineInfo]:
        """Waits until every engine is up."""
        return self._all("the start of the engines", "ready")

    def generate(self, requests: Sequence[GenerationRequest]) -> list[Generation]:
        """One generation per request, in order."""
        shares = spread(requests, len(self._handles))
        busy = [index for index, share in enumerate(shares) if share]
        refs = [self._handles[index].generate.remote([requests[i] for i in shares[index]]) for index in busy]
        replies = self._wait(refs, f"{len(requests)} generations", [self._members[index] for index in busy])
        by_position: dict[int, Generation] = {}
        for index, reply in zip(busy, replies, strict=True):
            by_position |= dict(zip(shares[index], reply, strict=True))
        return [by_position[position] for position in range(len(requests))]

    def begin(self, engine: int, requests: Sequence[GenerationRequest]) -> ray.ObjectRef:
        """Hand requests to one engine and do not wait; `done` gives the answers."""
        return self._handles[engine].generate.remote(list(requests))

    def done(self, under_way: Mapping[ray.ObjectRef, int]) -> dict[ray.ObjectRef, list[Generation]]:
        """The answers to those calls of `begin` that are done, once any of them is. Each call with its engine."""
        refs, what = list(under_way), f"{len(under_way)} calls to generate"
        positions = first_done(refs, what, self._timeout_s, [self._members[engine] for engine in under_way.values()])
        return {refs[position]: ray.get(refs[position], timeout=self._timeout_s) for position in positions}

    def progress(self) -> tuple[int, int]:
        """(done, all) requests under way on all engines."""
        each = self._all("the progress of the engines", "progress")
        return sum(done for done, _ in each), sum(total for _, total in each)

    def score(self, sequences: Sequence[Sequence[int]]) -> list[list[NDArray[np.float32]]]:
        """Every engine's log-probs of every sequence, at temperature 1: [engine][sequence]."""
        return self._all("the log-probs of the probe", "score", [list(ids) for ids in sequences])

    def connect(self, host: str, port: int, meet: Callable[[int], ray.ObjectRef], trainer: Member) -> None:
        """Join all engines to the trainer's stream; `meet(world_size)` has the trainer wait for them there."""
        workers = [info.num_workers for info in self.ready()]
        ranks = np.cumsum([1, *workers]).tolist()
        refs = [meet(ranks[-1])]
        for handle, rank in zip(self._handles, ranks, strict=False):
            refs.append(handle.connect.remote(host, port, rank, ranks[-1]))
        self._wait(refs, "the connection of trainer and engines", [trainer, *self._members])

    def sync(
        self, backend: str, version: int, publish: Callable[[], Sequence[ray.ObjectRef]], trainers: Sequence[Member]
    ) -> tuple[Manifest, list[SyncReport]]:
        """Bring weights to every engine. `publish()` starts the senders; the first one's result is the manifest.

        Raises:
            WeightSyncError: an engine did not receive, or does not hold, what was sent.
        """
        what = f"the weight sync of version {version}"
        if backend in STREAMS:
            refs = [handle.update_weights.remote(Manifest(version)) for handle in self._handles]
            replies = self._wait([*publish(), *refs], what, [*trainers, *self._members])
            return replies[0], replies[len(trainers) :]
        manifest = self._wait(publish(), what, trainers)[0]
        return manifest, self.update_weights(manifest)

    def update_weights(self, manifest: Manifest) -> list[SyncReport]:
        """Have every engine load what was published to a file."""
        return self._all(f"the weight sync of version {manifest.version}", "update_weights", manifest)

    def sleep(self) -> None:
        """Lend the engines' GPU memory to the trainer (nothing happens without vllm.enable_sleep, or on the CPU)."""
        self._all("the engines to sleep", "sleep")

    def wake(self) -> None:
        """Take the GPU memory back."""
        self._all("the engines to wake", "wake")

    def close(self) -> None:
        """Stop the engines."""
        self._all("the engines to stop", "close")

    def _all(self, what: str, method: str, *arguments: Any) -> list[Any]:
        refs = [getattr(handle, method).remote(*arguments) for handle in self._handles]
        return self._wait(refs, what, self._members)

    def _wait(self, refs: Sequence[ray.ObjectRef], what: str, members: Sequence[Member]) -> list[Any]:
        return wait_for(refs, what, self._timeout_s, members)


def spread(requests: Sequence[GenerationRequest], engines: int) -> list[list[int]]:
    """Positions of the requests each engine gets: equal prompts stay together, so that their KV can be shared, and each
    group goes to the engine with the fewest requests so far."""
    groups: dict[tuple[int, ...], list[int]] = {}
    for position, request in enumerate(requests):
        groups.setdefault(tuple(request.prompt_ids), []).append(position)
    shares: list[list[int]] = [[] for _ in range(engines)]
    for group in groups.values():
        min(shares, key=len).extend(group)
    return shares


BUNDLE = 16  # requests in one call of an engine; its answers come together
AHEAD = 2  # requests handed to an engine, in multiples of what it runs at once


class Dispatcher:
    """Hands requests to the engines in their order; the answers come as they are ready."""

    def __init__(self, pool: EnginePool, max_num_seqs: int) -> None:
        self.pool, self.limit = pool, AHEAD * max_num_seqs
        self.waiting: deque[GenerationRequest] = deque()
        self.under_way: dict[ray.ObjectRef, int] = {}  # call -> its engine
        self.sizes: dict[ray.ObjectRef, int] = {}
        self.load = [0] * len(pool)  # requests that each engine has

    @property
    def has_capacity(self) -> bool:
        """Whether the engines could take more than they are given."""
        return not self.waiting

    @property
    def is_busy(self) -> bool:
        return bool(self.under_way)

    def submit(self, requests: Sequence[GenerationRequest]) -> None:
        """Line requests up behind the others."""
        self.waiting.extend(requests)
        self._feed()

    def collect(self) -> list[Generation]:
        """Waits for answers."""
        result: list[Generation] = []
        for ref, generations in self.pool.done(self.under_way).items():
            self.load[self.under_way.pop(ref)] -= self.sizes.pop(ref)
            result += generations
        self._feed()
        return result

    def _feed(self) -> None:
        while self.waiting:
            engine = self.load.index(min(self.load))
            if self.load[engine] >= self.limit:
                return
            bundle = [self.waiting.popleft() for _ in range(min(BUNDLE, len(self.waiting)))]
            ref = self.pool.begin(engine, bundle)
            self.under_way[ref], self.sizes[ref] = engine, len(bundle)
            self.load[engine] += len(bundle)
