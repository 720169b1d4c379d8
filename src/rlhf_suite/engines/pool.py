"""The driver's side of the rollout engines: each request goes to one engine, weights go to all, every wait has a
deadline, and an engine that dies is started again.

The engine that takes the place of a dead one has the same number, devices and settings, and gets the weights of the
last sync before anything else. So what it samples is what the dead one would have sampled. `vllm.max_restarts` limits
how often that happens.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine, Iterable, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol, TypeVar

import numpy as np
import ray
from numpy.typing import NDArray

from rlhf_suite.background import Ended
from rlhf_suite.data.generation import Generation, GenerationRequest
from rlhf_suite.engines.requests import EngineClient
from rlhf_suite.engines.spec import EngineInfo, Likeliest
from rlhf_suite.errors import RunError
from rlhf_suite.launch.actor_log import Member
from rlhf_suite.launch.link import Restarts
from rlhf_suite.launch.loop_thread import LoopThread
from rlhf_suite.launch.wait import ActorDied, wait_for
from rlhf_suite.waits import result
from rlhf_suite.weight_sync.digests import ADAPTER, WHOLE, Manifest, SyncReport

T = TypeVar("T")

# Backends whose sender and receivers work at the same time; with the others the engines start after the sender.
STREAMS = ("gloo", "nccl", "ipc")


class Client(Protocol):
    """Another process that asks the engines: it pauses and goes on with them. Its calls are made on their loop."""

    async def pause(self) -> None:
        """Return when no request is under way. Later ones wait for `resume`."""
        ...

    async def resume(self) -> None:
        """Go on after `pause`."""
        ...

    async def report(self) -> None:
        """Have everything counted that was done until now."""
        ...


class EnginePool:
    """Handles of `engines.actor.Engine` actors. members[i] is the name of handles[i] in error messages.

    `create(i, blocks)` starts an actor in the place of engine i, with as many blocks in its KV cache as that had (None:
    it is not known). This may happen `max_restarts` times to each.
    """

    def __init__(
        self,
        handles: Sequence[Any],
        members: Sequence[Member],
        timeout_s: float,
        create: Callable[[int, int | None], Any] | None = None,
        max_restarts: int = 0,
    ) -> None:
        self._handles, self.members, self.timeout_s = list(handles), list(members), timeout_s
        self._create, self._restarts = create, Restarts(len(self._handles), max_restarts, "vllm.max_restarts")
        self._kv_blocks: dict[int, int] = {}  # of the engines that have been ready
        self._lock = threading.RLock()  # no thread replaces an engine while another one calls all of them
        # What brings a new engine to the last sync: the weights, or a model and the adapter of the last sync beside it.
        self._published: list[Manifest] = []
        self._meetings = 0
        self._is_retired = False
        # Brings what was published to all engines by stream.
        self.send_again: Callable[[Sequence[Manifest]], None] | None = None
        self.loop = LoopThread("engine-requests")  # on which all requests of the driver are made
        self.client = EngineClient(self._handles, self.members, timeout_s, self.replacement)
        self.clients: list[Client] = []  # other processes that ask the engines
        self.busy: AbstractContextManager[None] = nullcontext()  # is entered by each request while an engine has it
        self._prompt_tokens = self._cached_tokens = 0  # of all requests since `cache_hits` was asked for

    def __len__(self) -> int:
        return len(self._handles)

    def ready(self) -> list[EngineInfo]:
        """Wait until every engine is running. One that dies while it starts is not started again."""
        return self._ready(range(len(self)))

    @property
    def handles(self) -> list[Any]:
        """Return the handles of the engines of this moment."""
        return [*self._handles]

    @property
    def restarts(self) -> int:
        """Return how often an engine was started again."""
        return self._restarts.total

    def retire(self) -> None:
        """End what waits for a response; from now on an engine that dies is not started again. For the end of a run."""
        self._is_retired = True
        self.start(self.client.close(RunError("the run has ended")))
        self.loop.end(RunError("the run has ended"))

    async def generate(self, request: GenerationRequest) -> Generation:
        """Return the response to a request. To be awaited in a coroutine of `start`."""
        response = await self.client.generate(request, self.busy)
        self.count(len(request.prompt_ids), response.cached_tokens)
        return response

    def count(self, prompt_tokens: int, cached_tokens: int) -> None:
        """Count the tokens of prompts, and those of them that an engine had in its KV cache."""
        self._prompt_tokens += prompt_tokens
        self._cached_tokens += cached_tokens

    def cache_hits(self) -> float | None:
        """Return the share of the prompt tokens of all requests since the last call that an engine had in its KV cache;
        None without any."""

        async def count() -> float | None:  # on the loop of the requests, so that none ends between the last lines
            await self._each(self.clients, "report")
            share = self._cached_tokens / self._prompt_tokens if self._prompt_tokens else None
            self._prompt_tokens = self._cached_tokens = 0
            return share

        return result(self.start(count()), "the hits of the prefix cache")

    def start(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        """Start a coroutine that makes requests. May be called on any thread."""
        return self.loop.start(work)

    def submit(self, request: GenerationRequest) -> Future[Generation]:
        """Start a request; the future has its response."""
        return self.start(self.generate(request))

    def generate_all(self, requests: Sequence[GenerationRequest]) -> list[Generation]:
        """Return one response per request, in order."""
        ended = Ended[Generation](f"{len(requests)} generations")
        futures = [self.submit(request) for request in requests]
        for future in futures:
            ended.add(future)
        for _ in ended.results(len(futures)):
            pass
        return [future.result(0) for future in futures]

    def pause(self) -> None:
        """Interrupt what is under way and return when no engine has a request. Later requests wait for `resume`."""
        result(self.start(self._each([self.client, *self.clients], "pause")), "the pause of the engines")
        if self.clients:  # what a process that died had asked for is still under way
            self._all("the pause of the engines", "interrupt")

    def resume(self) -> None:
        """Continue after `pause`."""
        result(self.start(self._each([self.client, *self.clients], "resume")), "the engines to go on")

    async def _each(self, clients: Sequence[EngineClient | Client], method: str) -> None:
        await asyncio.gather(*(getattr(client, method)() for client in clients))

    def score(self, sequences: Sequence[Sequence[int]]) -> list[list[NDArray[np.float32]]]:
        """Return every engine's log-probs of every sequence at temperature 1, as [engine][sequence]."""
        return self._all("the log-probs of the probe", "score", [list(ids) for ids in sequences])

    def score_likeliest(self, ids: Sequence[int], k: int) -> Likeliest:
        """Return the k likeliest tokens at each place of a sequence but the first, and their log-probs, [T - 1, k]."""
        answers = self._all("the likeliest tokens of a prompt", "score_likeliest", [list(ids)], k)
        likeliest: Likeliest = answers[0][0]
        return likeliest

    def connect(self, host: str, port: int, meet: Callable[[int, int], ray.ObjectRef], trainer: Member) -> str:
        """Connect all engines to the trainer's weight stream; `meet(world_size, meeting)` makes the trainer
        wait for them there, and returns why they cannot share memory, or "". Each time they meet in a new group, whose
        number is `meeting`."""
        workers = [info.num_workers for info in self.ready()]
        ranks = np.cumsum([1, *workers]).tolist()
        self._meetings += 1
        refs = [meet(ranks[-1], self._meetings)]
        for handle, rank in zip(self._handles, ranks, strict=False):
            refs.append(handle.connect.remote(host, port, rank, ranks[-1], self._meetings))
        return str(self._wait(refs, "the connection of trainer and engines", [trainer, *self.members])[0])

    @property
    def takes_adapters(self) -> bool:
        """Return whether the engines get adapters beside the weights of the model."""
        return all(info.takes_adapter for info in self.ready())

    @property
    def caches_prefixes(self) -> bool:
        """Return whether the engines share the keys and values of prompts that begin alike."""
        return all(info.caches_prefixes for info in self.ready())

    def sync(
        self,
        backend: str,
        version: int,
        send: Callable[[], Sequence[ray.ObjectRef]],
        trainers: Sequence[Member],
        part: str = WHOLE,
    ) -> tuple[Manifest, list[SyncReport]]:
        """Bring the weights to every engine, or a `part` of them. `send()` starts the senders; the result of the first
        one is the manifest.

        An engine that died before is started again first; a stream cannot be sent again once it has begun.

        Raises:
            WeightSyncError: an engine received, or holds after loading, other weights than the trainer sent.
        """
        with self._lock:
            if backend in STREAMS:
                for number, death in [*self._dead().items()][:1]:
                    self._restart(number, death)
                self._publish(Manifest(version, part=part))
                return self.stream(version, send, trainers, part)
            manifest = self._wait(send(), f"the weight sync of version {version}", trainers)[0]
            self._publish(manifest)
            return manifest, self.update_weights(manifest)

    def _publish(self, manifest: Manifest) -> None:
        """Take note of what engines have from now on: an adapter takes the place of the one before."""
        self._published = [*(self._published[:1] if manifest.part == ADAPTER else ()), manifest]

    def stream(
        self,
        version: int,
        send: Callable[[], Sequence[ray.ObjectRef]],
        trainers: Sequence[Member],
        part: str = WHOLE,
    ) -> tuple[Manifest, list[SyncReport]]:
        """Let all engines receive what `send()` starts to send."""
        refs = [handle.update_weights.remote(Manifest(version, part=part)) for handle in self._handles]
        members = [*trainers, *self.members]
        replies = self._wait([*send(), *refs], f"the weight sync of version {version}", members)
        return replies[0], replies[len(trainers) :]

    def update_weights(self, manifest: Manifest) -> list[SyncReport]:
        """Make every engine load the weights that were written to a file."""
        return self._all(f"the weight sync of version {manifest.version}", "update_weights", manifest)

    def sleep(self) -> None:
        """Free the engines' GPU memory for the trainer. Does nothing without vllm.enable_sleep, or on the CPU."""
        self._all("the engines to sleep", "sleep")

    def wake(self, part: str | None = None) -> None:
        """Take the GPU memory back: that of a part ("weights", "kv_cache"), or all."""
        self._all("the engines to wake", "wake", part)

    def close(self) -> None:
        """Stop the engines."""
        self._is_retired = True
        self._all("the engines to stop", "close")

    def replacement(self, number: int, handle: Any, death: ActorDied) -> Any:
        """Return the engine in the place of `handle`, the engine `number` that died: it has the weights of the last
        sync. May be called on any thread.

        Raises:
            ActorDied: the engine died more often than it may be started again.
        """
        with self._lock:
            if self._is_retired:
                raise death
            if self._handles[number] is handle:
                self._restart(number, death)
            return self._handles[number]

    def _restart(self, number: int, death: ActorDied) -> None:
        """Start the engine `number` again, and all others that are dead, and bring them the weights of the last
        sync."""
        names, started = [member.name for member in self.members], set[int]()
        while True:
            for one, its_death in (self._dead() | {number: death}).items():
                self._start_again(one, its_death)
                started.add(one)
            try:
                self._ready(started)
                self._restore(started)
                return
            except ActorDied as another:
                if another.name not in names:
                    raise
                number, death = names.index(another.name), another

    def _start_again(self, number: int, death: ActorDied) -> None:
        """Create the engine `number` again. Raise its death if that is not to be."""
        if self._is_retired or self._create is None:
            raise death
        self._restarts.count(number, death)
        ray.kill(self._handles[number])  # a process that only lost its connection must not stay
        self._handles[number] = self._create(number, self._kv_blocks.get(number))

    def _restore(self, engines: Iterable[int]) -> None:
        """Bring the weights of the last sync to engines that were started again."""
        if any(manifest.path is None for manifest in self._published):
            assert self.send_again is not None
            self.send_again(self._published)
            return
        for manifest in self._published:
            self._some(engines, f"the weights of version {manifest.version}", "update_weights", manifest)

    def _dead(self) -> dict[int, ActorDied]:
        """Return the engines whose process has ended, by number."""
        pings, dead = [handle.ping.remote() for handle in self._handles], dict[int, ActorDied]()
        for number, (ping, member) in enumerate(zip(pings, self.members, strict=True)):
            try:
                self._wait([ping], "a ping", [member])
            except ActorDied as death:
                dead[number] = death
        return dead

    def _ready(self, engines: Iterable[int]) -> list[EngineInfo]:
        numbers = sorted(engines)
        infos = self._some(numbers, "the start of the engines", "ready")
        self._kv_blocks |= {number: info.kv_blocks for number, info in zip(numbers, infos, strict=True)}
        return infos

    def _all(self, activity: str, method: str, *arguments: Any) -> list[Any]:
        """Call a method of all engines and wait for the results. If one dies meanwhile, it is started again, and all
        are called once more."""
        with self._lock:
            while True:
                try:
                    return self._some(range(len(self)), activity, method, *arguments)
                except ActorDied as death:
                    self._restart([member.name for member in self.members].index(death.name), death)

    def _some(self, engines: Iterable[int], activity: str, method: str, *arguments: Any) -> list[Any]:
        """Call a method of some engines and wait for the results."""
        numbers = sorted(engines)
        refs = [getattr(self._handles[number], method).remote(*arguments) for number in numbers]
        return self._wait(refs, activity, [self.members[number] for number in numbers])

    def _wait(self, refs: Sequence[ray.ObjectRef], activity: str, members: Sequence[Member]) -> list[Any]:
        return wait_for(refs, activity, self.timeout_s, members)
