"""What a process waits for at this moment: named waits, and the record of them in the folder of a run.

Whoever waits for something else (an actor, a source of rewards, an episode) does it within `with waiting("...")`. While
a run lasts, `recorded` writes the open waits and the place of the main thread to a file every few seconds. So the file
says what a run that stands still waits for, and what a killed run did last; `rlhf-suite why <run folder>` reads it.
"""

from __future__ import annotations

import itertools
import sys
import threading
import time
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rlhf_suite.disk import DiskError, write_json

RECORD_S = 2.0  # between two records
MAX_WAITS = 12  # in a record; hundreds of episodes wait in the same way
STACK_LINES = 12


@dataclass
class Wait:
    """A wait that has not ended: for what, for whom (names of log files, such as `actor-0`), since when (seconds of the
    epoch), and for how many seconds at most."""

    what: str
    who: Sequence[str]
    began: float
    limit_s: float | None


_open: dict[int, Wait] = {}
_numbers = itertools.count()


@contextmanager
def waiting(what: str, who: Sequence[str] = (), limit_s: float | None = None) -> Iterator[Wait]:
    """Note that the block waits for `what`. It may change `who` of the wait: to those who have not answered yet."""
    number = next(_numbers)
    _open[number] = Wait(what, list(who), time.time(), limit_s)
    try:
        yield _open[number]
    finally:
        del _open[number]


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
        thread.join()
        raise
    is_over.set()
    thread.join()
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
