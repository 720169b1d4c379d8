"""The event loop of the programs of a user that are coroutine functions."""

from __future__ import annotations

import threading
from collections.abc import Coroutine
from functools import cache
from typing import Any

from rlhf_suite.launch.loop_thread import REMEDY, LoopThread
from rlhf_suite.tracking.console import show_line

BLOCKED_S = 2.0  # an event loop on which a program has not begun after this is blocked


class ProgramLoop:
    """The event loop of the coroutine functions of programs. There is one for the life of the process, so that clients
    and semaphores may be kept from one episode to the next; where a program blocks it, later ones get a new loop.
    """

    def __init__(self) -> None:
        self.lock, self.loop = threading.Lock(), LoopThread("programs")

    def run(self, program: Coroutine[Any, Any, Any]) -> Any:
        """Return what a coroutine returns. Call this on a thread that may wait."""
        while True:
            loop, begun, claim = self.loop, threading.Event(), threading.Lock()

            async def begin(begun: threading.Event = begun, claim: threading.Lock = claim) -> Any:
                if not claim.acquire(blocking=False):  # it has begun on another loop
                    return None
                begun.set()
                return await program

            future = loop.start(begin())
            if begun.wait(BLOCKED_S) or not claim.acquire(blocking=False):
                return future.result()  # no-limit: it is done
            with self.lock:
                if self.loop is loop:
                    place = loop.find_running()[1]
                    show_line(f"{place} blocks the episodes of its process. {REMEDY}.", to_stderr=True)
                    self.loop = LoopThread("programs")


@cache
def program_loop() -> ProgramLoop:
    """Return the loop of this process; it is started with the first coroutine function."""
    return ProgramLoop()
