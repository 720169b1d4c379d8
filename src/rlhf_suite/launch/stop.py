"""Stop a run on SIGTERM, SIGUSR2 or SIGHUP: its loop checks for the request after every step, saves, and ends.

Slurm sends SIGUSR2 before the time limit and SIGTERM at a preemption; `docker stop` and `timeout` send SIGTERM; a
terminal that closes sends SIGHUP. Inside `deferred` the first signal is only recorded: the loop reads it with
`requested` after its current step, saves a checkpoint and raises `Stopped`. A second signal raises `Stopped` at once.
So does a first signal outside `deferred`, for example during the start, when there is nothing to save.
"""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

SIGNALS = (signal.SIGTERM, signal.SIGUSR2, signal.SIGHUP)
# `timeout` signals the process and then its group: a signal that follows within this time is the same request.
REPEATED_S = 1.0


class Stopped(SystemExit):
    """The run ends because it received signal `number`. The exit code is 128 + number, as in shells.

    `saved` names the last step or row that is saved. It is empty if nothing could be saved.
    """

    def __init__(self, number: int, saved: str = "") -> None:
        super().__init__(128 + number)
        self.number, self.saved = number, saved

    def __str__(self) -> str:
        saved = f"; everything up to {self.saved} is saved" if self.saved else ""
        return f"stopped by {signal.Signals(self.number).name}{saved}"


class _State:
    """The state of the signal handler. There is one per process, as there is one handler per process."""

    number: int | None = None  # the first signal that arrived
    at = 0.0  # when it arrived
    depth = 0  # of nested `stoppable` blocks
    is_deferred = False


_state = _State()


def requested() -> int | None:
    """Return the signal that asked this run to stop, or None if there was none."""
    return _state.number


@contextmanager
def stoppable() -> Iterator[None]:
    """Handle the signals as described above during the block, then restore the earlier handlers."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, _receive) for number in SIGNALS if not _is_ignored(number)}
    _state.depth += 1
    try:
        yield
    except SystemExit as error:
        if _state.number is None or isinstance(error, Stopped):
            raise
        raise Stopped(_state.number) from error  # a library has replaced our exception by its own
    finally:
        _state.depth -= 1
        if _state.depth == 0:
            _state.number = None
        for number, handler in before.items():
            signal.signal(number, handler if handler is not None else signal.SIG_DFL)


@contextmanager
def deferred() -> Iterator[None]:
    """Only record a first signal during the block, for a loop that calls `requested` after every step."""
    before, _state.is_deferred = _state.is_deferred, True
    try:
        yield
    finally:
        _state.is_deferred = before


@contextmanager
def signals_blocked() -> Iterator[None]:
    """Block the signals while foreign daemons are started, and keep our signal handlers.

    Slurm signals every process of a job, and `timeout` signals a whole process group, but only the driver may act. The
    daemons inherit the block and never receive the signals. This process receives a blocked signal at the end of the
    block. If another thread receives it earlier, the handler runs that Ray has installed for SIGTERM, which exits.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    handlers = {number: signal.getsignal(number) for number in SIGNALS}
    try:
        yield
    except SystemExit as error:
        raise Stopped(_state.number or signal.SIGTERM) from error
    finally:
        if threading.current_thread() is threading.main_thread():
            for number, handler in handlers.items():
                signal.signal(number, handler if handler is not None else signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _is_ignored(number: int) -> bool:
    """Return whether the user wants to ignore the signal, as `nohup` does with SIGHUP."""
    return number == signal.SIGHUP and signal.getsignal(number) == signal.SIG_IGN


def _receive(number: int, _frame: FrameType | None) -> None:
    """Handle a signal: record the first one, and raise Stopped unless it is deferred."""
    now = time.monotonic()
    if _state.number is None:
        _state.number, _state.at = number, now
        if _state.is_deferred:
            return
    elif now - _state.at < REPEATED_S:
        return
    raise Stopped(_state.number)
