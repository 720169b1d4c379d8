"""One awaitable for each request, over all engines. On the wire, requests and responses travel in bundles.

Every request goes through here: rollouts, evaluations, files of prompts and the turns of agents.
"""

from __future__ import annotations

import asyncio
import threading
import uuid
from collections import deque
from collections.abc import Coroutine, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from itertools import count
from typing import Any, TypeVar

import ray

from rlhf_suite.data.generation import Generation, GenerationRequest
from rlhf_suite.launch.actor_log import Member
from rlhf_suite.launch.wait import reply

T = TypeVar("T")

HOMES = 1 << 16  # affinities that are remembered
AHEAD = 2  # requests of a long queue that an engine has, in multiples of the number that it runs at once


class EngineClient:
    """The engines, as one process sees them. All calls must be made on one event loop."""

    def __init__(self, handles: Sequence[Any], members: Sequence[Member], timeout_s: float) -> None:
        self.links = [Link(handle, member, timeout_s) for handle, member in zip(handles, members, strict=True)]
        self.homes: dict[int, Link] = {}  # affinity -> engine

    async def generate(self, request: GenerationRequest) -> Generation:
        """Return the response to a request."""
        return await self.home(request).send(request)

    def home(self, request: GenerationRequest) -> Link:
        """Return the engine for a request: that of its affinity, else the one with the fewest requests."""
        key = hash(tuple(request.prompt_ids)) if request.affinity is None else request.affinity
        if key not in self.homes:
            if len(self.homes) >= HOMES:
                del self.homes[next(iter(self.homes))]
            self.homes[key] = min(self.links, key=lambda link: len(link.pending))
        return self.homes[key]


class Link:
    """The connection to one engine."""

    def __init__(self, handle: Any, member: Member, timeout_s: float) -> None:
        self.handle, self.member, self.timeout_s = handle, member, timeout_s
        self.name = uuid.uuid4().hex  # of this connection, for the engine
        self.pending: dict[int, asyncio.Future[Generation]] = {}  # by the number of the request
        self.outbox: list[tuple[int, GenerationRequest]] = []
        self.numbers = count()
        self.tasks: set[asyncio.Task[None]] = set()  # the event loop itself keeps only weak references
        self.accepted = 0  # requests that the engine has

    async def send(self, request: GenerationRequest) -> Generation:
        """Send a request with all others of this turn of the event loop, and wait for its response."""
        number = next(self.numbers)
        self.pending[number] = asyncio.get_running_loop().create_future()
        if not self.outbox:
            asyncio.get_running_loop().call_soon(self.flush)
        self.outbox.append((number, request))
        return await self.pending[number]

    def flush(self) -> None:
        """Send the requests that wait."""
        bundle, self.outbox = self.outbox, []
        self.start(self.submit(bundle))

    def start(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)

    async def submit(self, bundle: list[tuple[int, GenerationRequest]]) -> None:
        """Send requests, and begin to receive if nobody does. Requests that the engine refuses fail."""
        try:
            await self.call(self.handle.submit.remote(self.name, bundle), f"{len(bundle)} generations")
        except Exception as error:
            self.fail([number for number, _ in bundle], error)
            return
        self.accepted += len(bundle)
        if self.accepted == len(bundle):
            self.start(self.receive())

    async def receive(self) -> None:
        """Receive responses while the engine has requests."""
        try:
            while self.accepted:
                what = f"{self.accepted} generations"
                done = await self.call(self.handle.finished.remote(self.name), what)
                self.accepted -= len(done)
                for number, generation in done:
                    if not (waiter := self.pending.pop(number)).cancelled():
                        waiter.set_result(generation)
        except Exception as error:
            self.accepted = 0
            self.fail([*self.pending], error)

    async def call(self, ref: ray.ObjectRef, what: str) -> Any:
        return await reply(ref, what, self.timeout_s, self.member)

    def fail(self, numbers: Sequence[int], error: Exception) -> None:
        """Raise `error` in everyone who waits for one of these requests."""
        for number in numbers:
            waiter = self.pending.pop(number, None)
            if waiter is not None and not waiter.cancelled():
                waiter.set_exception(error)


class LoopThread:
    """An event loop in a thread of its own, for coroutines that ordinary code waits for."""

    def __init__(self, name: str) -> None:
        self.loop = asyncio.new_event_loop()
        threading.Thread(target=self.loop.run_forever, name=name, daemon=True).start()

    def start(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        """Start a coroutine. May be called on any thread."""
        return asyncio.run_coroutine_threadsafe(work, self.loop)


class Dispatcher:
    """Sends a long stream of requests in order, as many at a time as keep the engines busy. Responses come when they
    are ready."""

    def __init__(self, engines: Any, limit: int) -> None:
        """Use `engines.submit` for at most `limit` requests at a time."""
        self.engines, self.limit = engines, limit
        self.waiting: deque[GenerationRequest] = deque()
        self.in_flight: set[Future[Generation]] = set()

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
        done, self.in_flight = wait(self.in_flight, return_when=FIRST_COMPLETED)
        self._feed()
        return [future.result() for future in done]

    def _feed(self) -> None:
        """Send requests while there is capacity."""
        while self.waiting and len(self.in_flight) < self.limit:
            self.in_flight.add(self.engines.submit(self.waiting.popleft()))
