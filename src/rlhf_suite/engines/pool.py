"""The driver's side of the rollout engines: each request goes to one engine, weights go to all, every wait has a
deadline."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import ray
from numpy.typing import NDArray

from rlhf_suite.data.generation import Generation, GenerationRequest
from rlhf_suite.engines.spec import EngineInfo
from rlhf_suite.launch.actor_log import Member
from rlhf_suite.launch.wait import first_done, wait_for
from rlhf_suite.weight_sync.digests import Manifest, SyncReport

# Backends whose sender and receivers work at the same time; with the others the engines start after the sender.
STREAMS = ("gloo", "nccl", "ipc")


class EnginePool:
    """Handles of `engines.actor.Engine` actors. members[i] is the name of handles[i] in error messages."""

    def __init__(self, handles: Sequence[Any], members: Sequence[Member], timeout_s: float) -> None:
        self._handles, self._members, self._timeout_s = list(handles), list(members), timeout_s

    def __len__(self) -> int:
        return len(self._handles)

    def ready(self) -> list[EngineInfo]:
        """Wait until every engine is running."""
        return self._all("the start of the engines", "ready")

    def generate(self, requests: Sequence[GenerationRequest]) -> list[Generation]:
        """Return one response per request, in order."""
        shares = assign_requests(requests, len(self._handles))
        busy = [index for index, share in enumerate(shares) if share]
        refs = [self._handles[index].generate.remote([requests[i] for i in shares[index]]) for index in busy]
        replies = self._wait(refs, f"{len(requests)} generations", [self._members[index] for index in busy])
        by_position: dict[int, Generation] = {}
        for index, reply in zip(busy, replies, strict=True):
            by_position |= dict(zip(shares[index], reply, strict=True))
        return [by_position[position] for position in range(len(requests))]

    def begin(self, engine: int, requests: Sequence[GenerationRequest]) -> ray.ObjectRef:
        """Send requests to one engine without waiting; `done` returns the responses."""
        return self._handles[engine].generate.remote(list(requests))

    def done(self, in_flight: Mapping[ray.ObjectRef, int]) -> dict[ray.ObjectRef, list[Generation]]:
        """Wait until any of the calls of `begin` is finished. Return the responses of all that are.

        `in_flight` gives the engine of each call.
        """
        refs, what = list(in_flight), f"{len(in_flight)} calls to generate"
        positions = first_done(refs, what, self._timeout_s, [self._members[engine] for engine in in_flight.values()])
        return {refs[position]: ray.get(refs[position], timeout=self._timeout_s) for position in positions}

    def progress(self) -> tuple[int, int]:
        """Return (finished, total) of the requests in flight on all engines."""
        each = self._all("the progress of the engines", "progress")
        return sum(done for done, _ in each), sum(total for _, total in each)

    def score(self, sequences: Sequence[Sequence[int]]) -> list[list[NDArray[np.float32]]]:
        """Return every engine's log-probs of every sequence at temperature 1, as [engine][sequence]."""
        return self._all("the log-probs of the probe", "score", [list(ids) for ids in sequences])

    def connect(self, host: str, port: int, meet: Callable[[int], ray.ObjectRef], trainer: Member) -> None:
        """Connect all engines to the trainer's weight stream; `meet(world_size)` makes the trainer
        wait for them there."""
        workers = [info.num_workers for info in self.ready()]
        ranks = np.cumsum([1, *workers]).tolist()
        refs = [meet(ranks[-1])]
        for handle, rank in zip(self._handles, ranks, strict=False):
            refs.append(handle.connect.remote(host, port, rank, ranks[-1]))
        self._wait(refs, "the connection of trainer and engines", [trainer, *self._members])

    def sync(
        self, backend: str, version: int, send: Callable[[], Sequence[ray.ObjectRef]], trainers: Sequence[Member]
    ) -> tuple[Manifest, list[SyncReport]]:
        """Bring the weights to every engine. `send()` starts the senders; the result of the first one is the manifest.

        Raises:
            WeightSyncError: an engine received, or holds after loading, other weights than the trainer sent.
        """
        what = f"the weight sync of version {version}"
        if backend in STREAMS:
            refs = [handle.update_weights.remote(Manifest(version)) for handle in self._handles]
            replies = self._wait([*send(), *refs], what, [*trainers, *self._members])
            return replies[0], replies[len(trainers) :]
        manifest = self._wait(send(), what, trainers)[0]
        return manifest, self.update_weights(manifest)

    def update_weights(self, manifest: Manifest) -> list[SyncReport]:
        """Make every engine load the weights that were written to a file."""
        return self._all(f"the weight sync of version {manifest.version}", "update_weights", manifest)

    def sleep(self) -> None:
        """Free the engines' GPU memory for the trainer. Does nothing without vllm.enable_sleep, or on the CPU."""
        self._all("the engines to sleep", "sleep")

    def wake(self) -> None:
        """Take the GPU memory back."""
        self._all("the engines to wake", "wake")

    def close(self) -> None:
        """Stop the engines."""
        self._all("the engines to stop", "close")

    def _all(self, what: str, method: str, *arguments: Any) -> list[Any]:
        """Call a method of all engines and wait for the results."""
        refs = [getattr(handle, method).remote(*arguments) for handle in self._handles]
        return self._wait(refs, what, self._members)

    def _wait(self, refs: Sequence[ray.ObjectRef], what: str, members: Sequence[Member]) -> list[Any]:
        return wait_for(refs, what, self._timeout_s, members)


def assign_requests(requests: Sequence[GenerationRequest], engines: int) -> list[list[int]]:
    """Return the positions of the requests that each engine gets.

    Equal prompts stay together, so that they can share their KV cache. Each group of them goes to the engine with the
    fewest requests so far.
    """
    groups: dict[tuple[int, ...], list[int]] = {}
    for position, request in enumerate(requests):
        groups.setdefault(tuple(request.prompt_ids), []).append(position)
    shares: list[list[int]] = [[] for _ in range(engines)]
    for group in groups.values():
        min(shares, key=len).extend(group)
    return shares


BUNDLE = 16  # requests in one call of an engine; their responses come together
AHEAD = 2  # requests sent to an engine, in multiples of the number that it runs at once


class Dispatcher:
    """Sends a stream of requests to the engines in order. Responses come when they are ready.

    Each engine gets new requests as soon as it has capacity, so that no engine becomes idle.
    """

    def __init__(self, pool: EnginePool, max_num_seqs: int) -> None:
        self.pool, self.limit = pool, AHEAD * max_num_seqs
        self.waiting: deque[GenerationRequest] = deque()
        self.in_flight: dict[ray.ObjectRef, int] = {}  # call -> its engine
        self.sizes: dict[ray.ObjectRef, int] = {}  # call -> the number of its requests
        self.load = [0] * len(pool)  # the number of requests that each engine has

    @property
    def has_capacity(self) -> bool:
        """Return whether the engines could take more requests than they have."""
        return not self.waiting

    @property
    def is_busy(self) -> bool:
        """Return whether requests are in flight."""
        return bool(self.in_flight)

    def submit(self, requests: Sequence[GenerationRequest]) -> None:
        """Append requests to the queue."""
        self.waiting.extend(requests)
        self._feed()

    def wait_for_responses(self) -> list[Generation]:
        """Wait until some responses are ready, and return them."""
        result: list[Generation] = []
        for ref, generations in self.pool.done(self.in_flight).items():
            self.load[self.in_flight.pop(ref)] -= self.sizes.pop(ref)
            result += generations
        self._feed()
        return result

    def _feed(self) -> None:
        """Send requests to the least loaded engine while it has capacity."""
        while self.waiting:
            engine = self.load.index(min(self.load))
            if self.load[engine] >= self.limit:
                return
            bundle = [self.waiting.popleft() for _ in range(min(BUNDLE, len(self.waiting)))]
            ref = self.pool.begin(engine, bundle)
            self.in_flight[ref], self.sizes[ref] = engine, len(bundle)
            self.load[engine] += len(bundle)
