"""An event loop in a thread of its own, the threads that it owns, and the watch over coroutines that block it."""

from __future__ import annotations

import asyncio
import sys
import threading
import time
import traceback
from collections.abc import Callable, Coroutine
from concurrent.futures import Future, InvalidStateError, wait
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

from rlhf_suite.background import in_background
from rlhf_suite.errors import RunError, UserError
from rlhf_suite.foreign_text import is_of_user
from rlhf_suite.tracking.console import show_line

T = TypeVar("T")

LOOK_S = 0.5  # between two looks of the watch
END_S = 5.0  # for what is cancelled to end
TURNS = 3  # of the loop before it stops
SLOW_S = 2.0  # the user is told of a coroutine that blocks the loop so long
REMEDY = "Write the function without `async` (it then runs in a thread of its own), or let it `await` what it waits for"


class LoopThread:
    """An event loop in a thread of its own, for coroutines that ordinary code waits for."""

    def __init__(self, name: str) -> None:
        self.loop = asyncio.new_event_loop()
        self.thread = threading.Thread(target=self.loop.run_forever, name=name, daemon=True)
        self.thread.start()
        self.open: set[Future[Any]] = set()  # for which somebody may wait
        self.ending: list[asyncio.Task[None]] = []  # the event loop itself keeps only weak references
        self.blocked: set[Future[Any]] = set()  # what `run_blocking` has under way
        self.error: BaseException | None = None  # why nothing more is done: a task failed, or the run ends

    def start(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        """Start a coroutine. May be called on any thread. The future fails if a coroutine blocks the loop."""
        result: Future[T] = Future()
        if self.error is not None:
            work.close()
            result.set_exception(self.error)
            return result
        self.open.add(result)
        result.add_done_callback(self.open.discard)

        def settle(done: Future[T]) -> None:
            with suppress(InvalidStateError):  # it failed before
                try:
                    result.set_result(done.result())  # no-limit: it is done
                except BaseException as error:
                    result.set_exception(error)

        asyncio.run_coroutine_threadsafe(work, self.loop).add_done_callback(settle)
        if self.error is not None:
            self.fail(self.error)
        return result

    def task(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        """Start a task of the run. May be called on any thread. If it fails, so does all that was started."""

        def look(done: Future[T]) -> None:
            if self.error is None and not done.cancelled() and (error := done.exception()) is not None:
                self.fail(error)

        result = self.start(work)
        result.add_done_callback(look)
        return result

    async def run_blocking(self, name: str, work: Callable[[], T]) -> T:
        """Do work that blocks in a thread `name` of its own, and return what it returns."""
        future = in_background(name, work)
        self.blocked.add(future)
        future.add_done_callback(self.blocked.discard)
        try:
            return await asyncio.wrap_future(future)
        except (KeyboardInterrupt, SystemExit) as error:  # they would end the loop, and nobody would hear why
            raise RunError(f"the thread {name} was ended by {error!r}") from error

    def join_threads(self, limit_s: float) -> None:
        """Wait for what `run_blocking` has under way."""
        wait([*self.blocked], limit_s)

    def watch(self, limit_s: float, flag: str) -> None:
        """From now on, name a coroutine that blocks the loop, and fail all that was started if one does so for
        `limit_s` seconds, which the flag `flag` says: nothing else on this loop can go on, not even time limits."""
        threading.Thread(
            target=self._watch, args=(limit_s, flag), name=f"{self.thread.name}-watch", daemon=True
        ).start()

    def _watch(self, limit_s: float, flag: str) -> None:
        turns, blocked_s = 0, 0.0  # turns: of the loop since the watch began
        before: tuple[object, int] | None = None
        told = set[str]()

        def count() -> None:
            nonlocal turns
            turns += 1

        while self.error is None:
            task = asyncio.current_task(self.loop)
            now = None if task is None else (task, turns)
            # Time is counted in looks: a process that was suspended has blocked nothing.
            blocked_s = blocked_s + LOOK_S if now is not None and now == before else 0.0
            before = now
            if blocked_s >= min(SLOW_S, limit_s):
                function, place = self.find_running()
                if function not in told:
                    show_line(f"{place} blocks all episodes of its process. {REMEDY}.", to_stderr=True)
                    told.add(function)
                if blocked_s >= limit_s:
                    self.fail(UserError(f"{place} has blocked all episodes for {flag}={limit_s:g} s. {REMEDY}"))
            self.loop.call_soon_threadsafe(count)
            time.sleep(LOOK_S)

    def find_running(self) -> tuple[str, str]:
        """Return the function that runs on the loop, and its line as `env.py:12 (step)`: the innermost call of the
        user's code if there is one."""
        calls = traceback.extract_stack(sys._current_frames()[self.thread.ident or 0])
        call = ([call for call in calls if is_of_user(Path(call.filename))] or calls)[-1]
        return f"{call.filename}:{call.name}", f"{Path(call.filename).name}:{call.lineno} ({call.name})"

    def fail(self, error: BaseException) -> None:
        """Raise `error` in everyone who waits for a coroutine of this loop, now and later."""
        self.error = self.error or error
        for task in [*self.open]:
            with suppress(InvalidStateError):  # it has just ended
                task.set_exception(error)

    def end(self, error: Exception) -> None:
        """Cancel all coroutines, raise `error` in everyone who waits for one, and end the thread. A coroutine that
        blocks the loop, or refuses to be cancelled, is not waited for."""

        async def cancel_all() -> None:
            tasks = asyncio.all_tasks() - {asyncio.current_task()}
            for task in tasks:
                task.cancel()
            if tasks:
                await asyncio.wait(tasks, timeout=END_S)
            for _ in range(TURNS):  # who waits for what has just ended hears of it
                await asyncio.sleep(0)
            self.loop.stop()

        self.fail(error)
        if self.thread.is_alive():
            self.loop.call_soon_threadsafe(lambda: self.ending.append(self.loop.create_task(cancel_all())))
            self.thread.join(2 * END_S)
