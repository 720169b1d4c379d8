"""What a process waits for at this moment: named waits, and the record of them in the folder of a run.

Whoever waits for something else (an actor, a source of rewards, a tool) does it within `with waiting("...")`; whoever
calls code of the user says with `runs` where that code is. While a run lasts, `recorded` writes the open waits and the
place of the main thread to a file every few seconds, and each of its other processes does so with `record_here`. So the
files say what a run that stands still waits for, and what a killed run did last; `rlhf-suite why <run folder>` reads
them. Of a run that fails, the record is that of the failure, not of the shutdown after it.

No wait is without end. One for another process has a limit of its own. One for a thread of this process ends when
nothing at all has happened here for `launch.timeout_s`: no `sign_of_life`, no wait that began or ended, and none that
is within its own limit. So work that goes on is never ended, however long it takes.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, wait
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from rlhf_suite.disk import DiskError, write_json
from rlhf_suite.errors import RunError
from rlhf_suite.foreign_text import is_of_user

T = TypeVar("T")

RECORD_S = 2.0  # between two records
RECORD_OTHERS_S = 5.0  # of a process beside the driver
RECORD = "RLHF_SUITE_RECORD"  # environment variable: how the path of a process's record begins, before its number
MAX_WAITS = 12  # in a record
STACK_LINES = 12
LIMIT = "launch.timeout_s"  # the flag that limits most waits
LOOK_S = 0.5  # between two looks for a sign of life
LATE_S = 60.0  # that a wait with a limit of its own may take longer before it no longer counts as a sign of life

Place = Callable[[], str]  # where code of the user is, as `/home/me/tools.py:12 in search`; "" if it runs none


@dataclass
class Wait:
    """A wait that has not ended: for what, for whom (names of processes, such as `actor-0`), since when (seconds of the
    epoch), and for how many seconds at most, which the flags `flag` say. Waits with the same `alike` count as one in
    a record. `place` says where the code of the user is that is waited for."""

    what: str
    who: Sequence[str]
    began: float
    limit_s: float | None
    flag: str = ""
    alike: str = ""
    place: Place | None = None


class _Life:
    """The life of this process: how many signs there were, and how long it may be without one."""

    signs = 0
    limit_s = 1800.0


_life = _Life()
_open: dict[int, Wait] = {}
_numbers = itertools.count()
_innermost: ContextVar[Wait | None] = ContextVar("innermost", default=None)  # of this thread or asyncio task


def sign_of_life() -> None:
    """Take note that something is done: a response, a micro-batch, a turn. Costs nothing; may be called anywhere."""
    _life.signs += 1


def signs_of_life() -> int:
    """Return how many signs there were in this process."""
    return _life.signs


def allow_silence(limit_s: float) -> None:
    """From now on, end a wait for a thread of this process after so many seconds without a sign of life."""
    _life.limit_s = limit_s


@contextmanager
def waiting(
    activity: str, who: Sequence[str] = (), limit_s: float | None = None, flag: str = "", alike: str = ""
) -> Iterator[Wait]:
    """Note that the block waits for `activity`. It may change `who` of the wait: to those who have not answered yet."""
    number = next(_numbers)
    sign_of_life()
    wait = _open[number] = Wait(activity, list(who), time.time(), limit_s, flag, alike)
    token = _innermost.set(wait)
    try:
        yield wait
    except BaseException as error:
        with suppress(AttributeError):
            vars(error).setdefault("_waits", []).append(wait)
        raise
    finally:
        del _open[number]
        sign_of_life()
        with suppress(ValueError):  # the block of a generator that is closed elsewhere
            _innermost.reset(token)


@contextmanager
def runs(place: Place) -> Iterator[None]:
    """Note where the code of the user is for which the innermost wait around this block waits."""
    wait = _innermost.get(None)
    if wait is None:
        yield
        return
    before, wait.place = wait.place, place
    try:
        yield
    finally:
        wait.place = before


def in_thread(number: int | None) -> str:
    """Return where the code of the user is in the thread with this `ident`, or in the coroutine that it runs: the
    innermost line outside of libraries and the suite; "" if there is none."""
    frames = [*traceback.walk_stack(sys._current_frames().get(number or 0))] if number else []
    place = users((frame.f_code.co_filename, line, frame.f_code.co_name) for frame, line in frames)
    if place:
        return place
    tasks = (frame.f_locals.get("future") for frame, _ in frames if frame.f_code.co_name == "run_until_complete")
    return next((in_coroutine(task.get_coro()) for task in tasks if isinstance(task, asyncio.Task)), "")


def in_coroutine(work: Any) -> str:
    """Return where the code of the user is in a coroutine, as `in_thread` does."""
    frames = list[tuple[str, int, str]]()
    while (frame := getattr(work, "cr_frame", None)) is not None:
        frames.insert(0, (frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name))
        work = work.cr_await
    return users(frames)


def users(calls: Iterable[tuple[str, int, str]]) -> str:
    """Return the first of the calls (file, line, function) that is in a file of the user; "" if there is none."""
    for file, line, function in calls:
        if is_of_user(Path(file)):
            return f"{file}:{line} in {function}"
    return ""


class Patience:
    """How long somebody has waited for a thread of this process without any sign of life.

    Time is counted in looks: a process that was suspended has not been silent.
    """

    def __init__(self, activity: str, *threads: str) -> None:
        """`activity` is waited for; `threads` are the names of the threads that may be doing it."""
        self.what, self.threads = activity, threads
        self.signs, self.silent_s, self.looked = _life.signs, 0.0, time.monotonic()

    def look(self) -> None:
        """Raise RunError if there was no sign of life for longer than the process may be without one."""
        now, signs = time.monotonic(), _life.signs
        silent_s = self.silent_s + min(now - self.looked, 2 * LOOK_S)
        self.silent_s = 0.0 if signs != self.signs or is_somebody_within_a_limit() else silent_s
        self.signs, self.looked = signs, now
        if self.silent_s > _life.limit_s:
            where = "".join(map(place_of, self.threads))
            raise RunError(f"nothing has happened for {_life.limit_s:g} s ({LIMIT}), waiting for {self.what}{where}")


def is_somebody_within_a_limit() -> bool:
    """Return whether a wait is open that will end by itself."""
    now = time.time()
    return any(wait.limit_s is not None and now < wait.began + wait.limit_s + LATE_S for wait in _open.copy().values())


def place_of(name: str) -> str:
    """Return where the thread `name` is, to be put after a sentence; "" if there is none."""
    idents = [thread.ident for thread in threading.enumerate() if name and thread.name == name]
    frame = sys._current_frames().get(idents[0] or 0) if idents else None
    if frame is None:
        return ""
    call = traceback.extract_stack(frame)[-1]
    return f"; the thread {name} is at {call.filename}:{call.lineno} in {call.name}"


def result(future: Future[T], activity: str, *threads: str) -> T:
    """Return the result of a future of this process; `activity` is its name, and one of `threads` makes it, if they are
    known."""
    if not future.done():
        patience = Patience(activity, *threads)
        with waiting(activity):
            while not wait([future], LOOK_S).done:
                patience.look()
    return future.result(0)


def open_waits() -> list[Wait]:
    """Return the waits that have not ended, the oldest first."""
    return sorted(_open.copy().values(), key=lambda wait: wait.began)


@contextmanager
def record_waits(file: Path) -> Iterator[None]:
    """Write a record every few seconds during the block, by a thread of its own. Without an error the file is gone
    afterwards; else it holds what the error has interrupted."""
    is_over = threading.Event()

    def work() -> None:
        while not is_over.is_set():
            keep(file)
            is_over.wait(RECORD_S)

    thread = threading.Thread(target=work, name="waits", daemon=True)
    thread.start()
    try:
        yield
    except BaseException as error:
        is_over.set()
        thread.join(RECORD_S)
        keep(file, error)
        raise
    is_over.set()
    thread.join(RECORD_S)
    with suppress(OSError):
        file.unlink(missing_ok=True)


def record_here(file: Path) -> None:
    """Write a record every few seconds for as long as this process lives, by a thread of its own."""

    def work() -> None:
        while True:
            keep(file)
            time.sleep(RECORD_OTHERS_S)

    threading.Thread(target=work, name="waits", daemon=True).start()


def keep(file: Path, error: BaseException | None = None) -> None:
    """Write a record, with an `error` that of a failure. A disk that is full must not end the run."""
    with suppress(OSError, DiskError):
        write_json(file, record() if error is None else record_of(error), durable=False)


def record() -> dict[str, Any]:
    """Return the open waits, and where the main thread is: its innermost calls, the last one last, and the place of the
    code of the user if it runs any."""
    main = threading.main_thread().ident
    frame = sys._current_frames().get(main or 0)
    calls = traceback.extract_stack(frame)[-STACK_LINES:] if frame is not None else []
    return describe_waits(open_waits(), calls) | {"place": in_thread(main)}


def record_of(error: BaseException) -> dict[str, Any]:
    """Return the waits that an error has ended, and the calls from which it came."""
    causes = [error]
    while (cause := cause_of(causes[-1])) is not None and cause not in causes:
        causes.append(cause)
    waits = [wait for error_of_chain in causes for wait in vars(error_of_chain).get("_waits", [])]
    calls = traceback.extract_tb(causes[-1].__traceback__)[-STACK_LINES:]
    return describe_waits(sorted(waits, key=lambda wait: wait.began), calls) | {"failed": True}


def cause_of(error: BaseException) -> BaseException | None:
    """Return the error that led to another one; None for the first."""
    return error.__cause__ or (None if error.__suppress_context__ else error.__context__)


def describe_waits(waits: Sequence[Wait], calls: Sequence[traceback.FrameSummary]) -> dict[str, Any]:
    """Return a record of waits, those that are alike as one with their number, and of calls."""
    groups: dict[object, list[Wait]] = {}
    for one in waits:
        groups.setdefault(one.alike or (one.what, tuple(one.who)), []).append(one)
    return {
        "time": time.time(),
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "waits": [entry(group) for group in itertools.islice(groups.values(), MAX_WAITS)],
        "more_waits": max(0, len(groups) - MAX_WAITS),
        "main_thread": [f"{call.filename}:{call.lineno} in {call.name}" for call in calls],
    }


def entry(waits: Sequence[Wait]) -> dict[str, Any]:
    """Return the entry of waits that are alike: the oldest of them, all who are waited for, and how many they are."""
    first = waits[0]
    values = {name: getattr(first, name) for name in ("what", "began", "limit_s", "flag")}
    place = "" if first.place is None else first.place()
    return values | {"who": sorted({name for wait in waits for name in wait.who}), "place": place, "count": len(waits)}
