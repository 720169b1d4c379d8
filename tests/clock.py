"""The clock of event loops, which a test may put forward: a limit of minutes is over at once where a test says so, and
what must happen before is nowhere near to it on a busy machine."""

from __future__ import annotations

import asyncio
import time
from contextlib import suppress
from weakref import WeakSet

HOURS_S = 36_000.0  # for what ends long before, unless the machine is asleep


class Clock:
    """What all event loops of this process take for the time."""

    latest: Clock  # for code of agents, which tests write into files

    def __init__(self) -> None:
        self.ahead, self.loops = 0.0, WeakSet[asyncio.AbstractEventLoop]()
        Clock.latest = self

    def time(self, loop: asyncio.AbstractEventLoop) -> float:
        """Return what a loop takes for the time."""
        self.loops.add(loop)
        return time.monotonic() + self.ahead

    def forward(self, seconds: float) -> None:
        """Put the clock forward, and wake the loops. To be called in any thread."""
        self.ahead += seconds
        for loop in [*self.loops]:
            with suppress(RuntimeError):  # it is closed
                loop.call_soon_threadsafe(lambda: None)
