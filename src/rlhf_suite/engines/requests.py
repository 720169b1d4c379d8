"""One awaitable for each request, over all engines. On the wire, requests and responses travel in bundles.

Every request goes through here: rollouts, evaluations, files of prompts and the turns of agents. If an engine dies, its
unfinished requests are sent to the engine that takes its place, with the same seeds, and who waits for them notices
nothing.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

from rlhf_suite.data.generation import (
    INTERRUPTED,
    Generation,
    GenerationRequest,
    content_number,
    continue_request,
    whole,
)
from rlhf_suite.launch.actor_log import Member
from rlhf_suite.launch.link import Link
from rlhf_suite.launch.wait import ActorDied

# Called with the number of an engine, its handle, and how it died; returns the handle of the engine in its place.
Replacement = Callable[[int, Any, ActorDied], Any]

NOTHING = nullcontext()
HOMES = 1 << 16  # affinities that are remembered


class EngineClient:
    """The engines, as one process sees them. All calls must be made on one event loop."""

    def __init__(
        self, handles: Sequence[Any], members: Sequence[Member], timeout_s: float, replacement: Replacement
    ) -> None:
        self.links = [
            EngineLink(handle, member, timeout_s, partial(replacement, number))
            for number, (handle, member) in enumerate(zip(handles, members, strict=True))
        ]
        self.homes: dict[int, EngineLink] = {}  # affinity -> engine
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
                parts = [*kept, await self.home(request).send(continue_request(request, kept))]
        return whole(parts)

    async def pause(self) -> None:
        """Let no engine work until `resume`: what is under way is interrupted, and keeps its tokens."""
        self.running.clear()
        await asyncio.gather(*(link.interrupt() for link in self.links))

    async def resume(self) -> None:
        """Let the engines continue what `pause` interrupted, and begin what was asked for since."""
        self.running.set()

    def home(self, request: GenerationRequest) -> EngineLink:
        """Return the engine for a request: that of its affinity, else the one with the fewest requests."""
        if request.affinity is not None:
            return self.home_of(request.affinity)
        return self.home_of(content_number(request.prompt_ids, request.images))

    def home_of(self, affinity: int) -> EngineLink:
        """Return the engine of an affinity; a new one gets that with the fewest requests and visits."""
        if affinity not in self.homes:
            self.settle(affinity, min(range(len(self.links)), key=lambda number: self.links[number].load))
        return self.homes[affinity]

    def settle(self, affinity: int, engine: int) -> None:
        """Send requests of an affinity to the engine of this number."""
        if affinity not in self.homes and len(self.homes) >= HOMES:
            del self.homes[next(iter(self.homes))]
        self.homes[affinity] = self.links[engine]

    @contextmanager
    def visit(self, affinity: int) -> Iterator[int]:
        """Count an episode of another process to the engine of an affinity, and yield the number of the engine."""
        link = self.home_of(affinity)
        link.visits += 1
        try:
            yield self.links.index(link)
        finally:
            link.visits -= 1

    async def close(self, error: Exception) -> None:
        """Raise `error` in everyone who waits for a response, or asks for one later."""
        self.end = error
        self.running.set()
        for link in self.links:
            link.fail([*link.pending], error)


class EngineLink(Link[GenerationRequest, Generation]):
    """The connection to one engine, and to the one that takes its place if it dies."""

    doing = "generations"
    again = "requests are sent again"
    visits = 0  # episodes of other processes whose turns this engine writes

    @property
    def load(self) -> int:
        """Return how much the engine has to do: requests of this process, and episodes of others."""
        return len(self.pending) + self.visits

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
