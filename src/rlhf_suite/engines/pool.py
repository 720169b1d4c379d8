"""The driver's side of the rollout engines: each request goes to one engine, weights go to all, every wait has a
deadline."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, nullcontext
from typing import Any, TypeVar

import numpy as np
import ray
from numpy.typing import NDArray

from rlhf_suite.data.generation import Generation, GenerationRequest
from rlhf_suite.engines.requests import EngineClient, LoopThread
from rlhf_suite.engines.spec import EngineInfo
from rlhf_suite.launch.actor_log import Member
from rlhf_suite.launch.wait import wait_for
from rlhf_suite.weight_sync.digests import Manifest, SyncReport

T = TypeVar("T")

# Backends whose sender and receivers work at the same time; with the others the engines start after the sender.
STREAMS = ("gloo", "nccl", "ipc")


class EnginePool:
    """Handles of `engines.actor.Engine` actors. members[i] is the name of handles[i] in error messages."""

    def __init__(self, handles: Sequence[Any], members: Sequence[Member], timeout_s: float) -> None:
        self._handles, self._members, self._timeout_s = list(handles), list(members), timeout_s
        self.loop = LoopThread("engine-requests")  # on which all requests of the driver are made
        self.client = EngineClient(self._handles, self._members, timeout_s)
        self.busy: AbstractContextManager[None] = nullcontext()  # is entered by each request while it is under way

    def __len__(self) -> int:
        return len(self._handles)

    def ready(self) -> list[EngineInfo]:
        """Wait until every engine is running."""
        return self._all("the start of the engines", "ready")

    async def generate(self, request: GenerationRequest) -> Generation:
        """Return the response to a request. To be awaited in a coroutine of `start`."""
        with self.busy:
            return await self.client.generate(request)

    def start(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        """Start a coroutine that makes requests. May be called on any thread."""
        return self.loop.start(work)

    def submit(self, request: GenerationRequest) -> Future[Generation]:
        """Start a request; the future has its response."""
        return self.start(self.generate(request))

    def generate_all(self, requests: Sequence[GenerationRequest]) -> list[Generation]:
        """Return one response per request, in order."""
        return [future.result() for future in [self.submit(request) for request in requests]]

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
