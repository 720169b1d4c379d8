"""What a process waits for at this moment: named waits, and the record of them in the folder of a run.

Whoever waits for something else (an actor, a source of rewards, an episode) does it within `with waiting("...")`. While
a run lasts, `recorded` writes the open waits and the place of the main thread to a file every few seconds. So the file
says what a run that stands still waits for, and what a killed run did last; `rlhf-suite why <run folder>` reads it.

No wait is without end. One for another process has a limit of its own. One for a thread of this process ends when
nothing at all has happened here for `launch.timeout_s`: no `sign_of_life`, no wait that began or ended, and none that
is within its own limit. So work that goes on is never ended, however long it takes.
"""

from __future__ import annotations

import itertools
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, wait
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeVar

from rlhf_suite.disk import DiskError, write_json
from rlhf_suite.errors import RunError

T = TypeVar("T")

RECORD_S = 2.0  # between two records
MAX_WAITS = 12  # in a record; hundreds of episodes wait in the same way
STACK_LINES = 12
LIMIT = "launch.timeout_s"  # the flag that limits most waits
LOOK_S = 0.5  # between two looks for a sign of life
LATE_S = 60.0  # that a wait with a limit of its own may take longer before it is no sign of life any more


@dataclass
class Wait:
    """A wait that has not ended: for what, for whom (names of log files, such as `actor-0`), since when (seconds of the
    epoch), and for how many seconds at most."""

    what: str
    who: Sequence[str]
    began: float
    limit_s: float | None


class _Life:
    """The life of this process: how many signs there were, and how long it may be without one."""

    signs = 0
    limit_s = 1800.0


_life = _Life()
_open: dict[int, Wait] = {}
_numbers = itertools.count()


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
def waiting(what: str, who: Sequence[str] = (), limit_s: float | None = None) -> Iterator[Wait]:
    """Note that the block waits for `what`. It may change `who` of the wait: to those who have not answered yet."""
    number = next(_numbers)
    sign_of_life()
    _open[number] = Wait(what, list(who), time.time(), limit_s)
    try:
        yield _open[number]
    finally:
        del _open[number]
        sign_of_life()


class Patience:
    """How long somebody has waited for a thread of this process without any sign of life.

    Time is counted in looks: a process that was suspended has not been silent.
    """

    def __init__(self, what: str, thread: str = "") -> None:
        """`what` is waited for; `thread` is the name of the thread that does it, if there is one."""
        self.what, self.thread = what, thread
        self.signs, self.silent_s, self.looked = _life.signs, 0.0, time.monotonic()

    def look(self) -> None:
        """Raise RunError if there was no sign of life for longer than the process may be without one."""
        now, signs = time.monotonic(), _life.signs
        silent_s = self.silent_s + min(now - self.looked, 2 * LOOK_S)
        self.silent_s = 0.0 if signs != self.signs or is_somebody_within_a_limit() else silent_s
        self.signs, self.looked = signs, now
        if self.silent_s > _life.limit_s:
            where = place_of(self.thread)
            raise RunError(f"nothing has happened for {_life.limit_s:g} s ({LIMIT}), waiting for {self.what}{where}")


def is_somebody_within_a_limit() -> bool:
    """Return whether a wait is open that will end by itself."""
    now = time.time()
    return any(each.limit_s is not None and now < each.began + each.limit_s + LATE_S for each in _open.copy().values())


def place_of(name: str) -> str:
    """Return where the thread `name` is, to be put behind a sentence; "" if there is none."""
    found = [thread.ident for thread in threading.enumerate() if name and thread.name == name]
    frame = sys._current_frames().get(found[0] or 0) if found else None
    if frame is None:
        return ""
    call = traceback.extract_stack(frame)[-1]
    return f"; the thread {name} is at {call.filename}:{call.lineno} in {call.name}"


def result(future: Future[T], what: str, thread: str = "") -> T:
    """Return the result of a future of this process; `what` is waited for, and `thread` makes it, if it is known."""
    if not future.done():
        patience = Patience(what, thread)
        with waiting(what):
            while not wait([future], LOOK_S).done:
                patience.look()
    return future.result(0)


class Shared:
    """What threads of a run share: the lock that guards it, and the first failure, which ends every wait for it."""

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.failure: BaseException | None = None

    def fail(self, error: BaseException) -> None:
        """Raise `error` in everyone who waits, now and later, unless something has failed before."""
        with self.changed:
            self.failure = self.failure or error
            self.changed.notify_all()

    def check(self) -> None:
        """Raise the first failure, if there is any."""
        if self.failure is not None:
            raise self.failure

    def until(self, ready: Callable[[], T | None], what: str, thread: str = "") -> T:
        """Return what `ready` finds, as soon as it is not None; raise the first failure. The caller holds `changed`,
        which is released meanwhile."""
        self.check()
        if (found := ready()) is not None:
            return found
        patience = Patience(what, thread)
        with waiting(what):
            while found is None:
                if not self.changed.wait(LOOK_S):
                    patience.look()
                self.check()
                found = ready()
        return found


def open_waits() -> list[Wait]:
    """Return the waits that have not ended, the oldest first."""
    return sorted(_open.copy().values(), key=lambda wait: wait.began)


@contextmanager
def recorded(file: Path) -> Iterator[None]:
    """Write a record every few seconds during the block, by a thread of its own. Without an error the file is gone
    afterwards; else it holds the state of the moment of the error."""
    is_over = threading.Event()

    def work() -> None:
        while not is_over.is_set():
            keep(file)
            is_over.wait(RECORD_S)

    thread = threading.Thread(target=work, name="waits", daemon=True)
    thread.start()
    try:
        yield
    except BaseException:
        is_over.set()
        thread.join(RECORD_S)
        raise
    is_over.set()
    thread.join(RECORD_S)
    with suppress(OSError):
        file.unlink(missing_ok=True)


def keep(file: Path) -> None:
    """Write a record. A disk that is full must not end the run."""
    with suppress(OSError, DiskError):
        write_json(file, record(), durable=False)


def record() -> dict[str, Any]:
    """Return the open waits and the innermost calls of the main thread, the last one last."""
    waits = open_waits()
    main = sys._current_frames().get(threading.main_thread().ident or 0)
    calls = traceback.extract_stack(main)[-STACK_LINES:] if main is not None else []
    return {
        "time": time.time(),
        "waits": [asdict(wait) for wait in waits[:MAX_WAITS]],
        "more_waits": max(0, len(waits) - MAX_WAITS),
        "main_thread": [f"{call.filename}:{call.lineno} in {call.name}" for call in calls],
    }
