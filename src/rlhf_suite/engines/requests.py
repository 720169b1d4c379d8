"""One awaitable for each request, over all engines. On the wire, requests and responses travel in bundles.

Every request goes through here: rollouts, evaluations, files of prompts and the turns of agents. If an engine dies, its
unfinished requests are sent to the engine that takes its place, with the same seeds, and who waits for them notices
nothing.
"""

from __future__ import annotations

import asyncio
import threading
import uuid
from collections import deque
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from itertools import count
from typing import Any, TypeVar

import ray

from rlhf_suite.data.generation import INTERRUPTED, Generation, GenerationRequest, content_number, continued, whole
from rlhf_suite.launch.actor_log import Member
from rlhf_suite.launch.wait import ActorDied, reply
from rlhf_suite.tracking.console import show_line

T = TypeVar("T")
# Called with the number of an engine, its handle, and how it died; returns the handle of the engine in its place.
Replacement = Callable[[int, Any, ActorDied], Any]

NOTHING = nullcontext()
HOMES = 1 << 16  # affinities that are remembered
AHEAD = 2  # requests of a long queue that an engine has, in multiples of the number that it runs at once


class EngineClient:
    """The engines, as one process sees them. All calls must be made on one event loop."""

    def __init__(
        self, handles: Sequence[Any], members: Sequence[Member], timeout_s: float, replacement: Replacement
    ) -> None:
        self.links = [
            Link(handle, member, timeout_s, partial(replacement, number))
            for number, (handle, member) in enumerate(zip(handles, members, strict=True))
        ]
        self.homes: dict[int, Link] = {}  # affinity -> engine
        self.running = asyncio.Event()  # unset while the engines are paused
        self.running.set()
        self.end: Exception | None = None

    async def generate(self, request: GenerationRequest, busy: AbstractContextManager[None] = NOTHING) -> Generation:
        """Return the response to a request. `busy` is entered while an engine has it.

        If the engines are paused meanwhile, it is continued later from the tokens that it has. One with stop strings
        begins again, under the same seed: an engine does not see a string of which it wrote only the end.
        """
        parts: list[Generation] = []
        while not parts or parts[-1].finish_reason == INTERRUPTED:
            await self.running.wait()
            if self.end is not None:
                raise self.end
            kept = [] if request.sampling.stop else parts
            with busy:
                parts = [*kept, await self.home(request).send(continued(request, kept))]
        return whole(parts)

    async def pause(self) -> None:
        """Let no engine work until `resume`: what is under way is interrupted, and keeps its tokens."""
        self.running.clear()
        await asyncio.gather(*(link.interrupt() for link in self.links))

    async def resume(self) -> None:
        """Let the engines continue what `pause` interrupted, and begin what was asked for since."""
        self.running.set()

    def home(self, request: GenerationRequest) -> Link:
        """Return the engine for a request: that of its affinity, else the one with the fewest requests."""
        key = content_number(request.prompt_ids, request.images) if request.affinity is None else request.affinity
        if key not in self.homes:
            if len(self.homes) >= HOMES:
                del self.homes[next(iter(self.homes))]
            self.homes[key] = min(self.links, key=lambda link: len(link.pending))
        return self.homes[key]

    async def close(self, error: Exception) -> None:
        """Raise `error` in everyone who waits for a response, or asks for one later."""
        self.end = error
        self.running.set()
        for link in self.links:
            link.fail([*link.pending], error)


class Link:
    """The connection to one engine, and to the one that takes its place if it dies."""

    def __init__(
        self, handle: Any, member: Member, timeout_s: float, replacement: Callable[[Any, ActorDied], Any]
    ) -> None:
        self.handle, self.member, self.timeout_s, self.replacement = handle, member, timeout_s, replacement
        self.is_waiting = False  # for another engine
        self.name = uuid.uuid4().hex  # of this connection, for the engine
        self.pending: dict[int, asyncio.Future[Generation]] = {}  # by the number of the request
        self.requests: dict[int, GenerationRequest] = {}  # what the pending ones ask for
        self.outbox: list[tuple[int, GenerationRequest]] = []
        self.numbers = count()
        self.tasks: set[asyncio.Task[None]] = set()  # the event loop itself keeps only weak references
        self.accepted = 0  # requests that the engine has

    async def send(self, request: GenerationRequest) -> Generation:
        """Send a request with all others of this turn of the event loop, and wait for its response."""
        number = next(self.numbers)
        self.pending[number] = asyncio.get_running_loop().create_future()
        self.requests[number] = request
        if not self.outbox:
            asyncio.get_running_loop().call_soon(self.flush)
        self.outbox.append((number, request))
        return await self.pending[number]

    def flush(self) -> None:
        """Send the requests that wait."""
        bundle, self.outbox = self.outbox, []
        if bundle and not self.is_waiting:  # the next engine gets all that are pending
            self.start(self.submit(bundle))

    def start(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)

    async def submit(self, bundle: list[tuple[int, GenerationRequest]]) -> None:
        """Send requests, and begin to receive if nobody does. Requests that the engine refuses fail."""
        handle = self.handle
        try:
            await self.call(handle.submit.remote(self.name, bundle), f"{len(bundle)} generations")
        except ActorDied as death:
            await self.recover(handle, death)
            return
        except Exception as error:
            self.fail([number for number, _ in bundle], error)
            return
        self.accepted += len(bundle)
        if self.accepted == len(bundle):
            self.start(self.receive())

    async def receive(self) -> None:
        """Receive responses while the engine has requests."""
        handle = self.handle
        try:
            while self.accepted:
                what = f"{self.accepted} generations"
                done = await self.call(handle.finished.remote(self.name), what)
                self.accepted -= len(done)
                for number, generation in done:
                    if not (waiter := self.taken(number)).cancelled():
                        waiter.set_result(generation)
        except ActorDied as death:
            await self.recover(handle, death)
        except Exception as error:
            self.accepted = 0
            self.fail([*self.pending], error)

    async def interrupt(self) -> None:
        """End what the engine has or is about to get, and wait for the responses. The loop ends: while it runs nothing
        new is sent."""
        while self.pending:
            handle = self.handle
            try:
                await self.call(handle.interrupt.remote(), "the pause of the engines")
            except ActorDied as death:
                await self.recover(handle, death)
            if self.pending:
                await asyncio.wait([*self.pending.values()], return_when=asyncio.FIRST_COMPLETED)

    async def recover(self, handle: Any, death: ActorDied) -> None:
        """Send the unfinished requests to the engine that takes the place of `handle`, which died. Several calls may
        notice one death."""
        if handle is not self.handle or self.is_waiting:
            return
        self.is_waiting = True
        try:
            self.handle = await in_thread(lambda: self.replacement(handle, death))
        except Exception as error:
            self.fail([*self.pending], error)
            return
        finally:
            self.is_waiting, self.accepted, self.outbox = False, 0, []
        for number in [number for number, waiter in self.pending.items() if waiter.cancelled()]:
            self.taken(number)
        if self.requests:
            show_line(f"{self.member.name} runs again: its {len(self.requests)} unfinished requests are sent again")
            self.start(self.submit([*self.requests.items()]))

    async def call(self, ref: ray.ObjectRef, what: str) -> Any:
        return await reply(ref, what, self.timeout_s, self.member)

    def fail(self, numbers: Sequence[int], error: Exception) -> None:
        """Raise `error` in everyone who waits for one of these requests."""
        for number in numbers:
            if number in self.pending and not (waiter := self.taken(number)).cancelled():
                waiter.set_exception(error)

    def taken(self, number: int) -> asyncio.Future[Generation]:
        """Return who waits for a request, which is over."""
        del self.requests[number]
        return self.pending.pop(number)


async def in_thread(work: Callable[[], T]) -> T:
    """Do blocking work in a thread that does not keep the process alive."""
    result: Future[T] = Future()

    def run() -> None:
        try:
            result.set_result(work())
        except BaseException as error:
            result.set_exception(error)

    threading.Thread(target=run, name="engine-restart", daemon=True).start()
    return await asyncio.wrap_future(result)


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
