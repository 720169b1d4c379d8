"""SIGTERM, SIGUSR2 and SIGHUP ask a run to stop; its loops look for the request after every step, save, and end.

Slurm sends the first two before a time limit and at a preemption; `docker stop` and `timeout` send SIGTERM; a terminal
that closes sends SIGHUP. While a loop works on its steps (`deferred`), the first signal is only noted: the loop asks
for it with `requested` at its next step boundary, saves a checkpoint and raises `Stopped`. A second signal raises
`Stopped` at once, and so does a first signal where no loop is at work yet: during the start there is nothing to save.
"""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

SIGNALS = (signal.SIGTERM, signal.SIGUSR2, signal.SIGHUP)
# `timeout` sends its signal to the process and then to its group: what follows so soon is the same request.
REPEATED_S = 1.0


class Stopped(SystemExit):
    """The run ends because signal `number` asked for it. The exit code is 128 + number, as shells write it.

    `saved` names the last step or row that is saved; empty when the run ended where nothing could be saved.
    """

    def __init__(self, number: int, saved: str = "") -> None:
        super().__init__(128 + number)
        self.number, self.saved = number, saved

    def __str__(self) -> str:
        saved = f"; everything up to {self.saved} is saved" if self.saved else ""
        return f"stopped by {signal.Signals(self.number).name}{saved}"


class _State:
    """What the signal handler knows. One per process, because signal handlers are too."""

    number: int | None = None  # the first signal that arrived
    at = 0.0  # when it arrived
    depth = 0  # of nested `stoppable` blocks
    is_deferred = False


_state = _State()


def requested() -> int | None:
    """The signal that asked this run to stop; None as long as there was none."""
    return _state.number


@contextmanager
def stoppable() -> Iterator[None]:
    """In the block the signals stop the run as the module says; afterwards the earlier handlers are back."""
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
        raise Stopped(_state.number) from error  # a library replaced the exception that passed through it
    finally:
        _state.depth -= 1
        if _state.depth == 0:
            _state.number = None
        for number, handler in before.items():
            signal.signal(number, handler if handler is not None else signal.SIG_DFL)


@contextmanager
def deferred() -> Iterator[None]:
    """In the block a first signal is only noted, for a loop that asks `requested` after every step."""
    before, _state.is_deferred = _state.is_deferred, True
    try:
        yield
    finally:
        _state.is_deferred = before


@contextmanager
def signals_blocked() -> Iterator[None]:
    """Start foreign daemons in this block: they never receive the signals, and the handlers stay ours.

    Slurm signals every process of a job and `timeout` a whole process group, but only the driver may decide. A blocked
    signal is inherited by children; this process receives it at the end of the block, or when another thread of it
    takes the signal, by the handler for SIGTERM that Ray has installed by then: that one exits.
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
    """Whether the user wants the signal ignored: `nohup` does so with SIGHUP."""
    return number == signal.SIGHUP and signal.getsignal(number) == signal.SIG_IGN


def _receive(number: int, _frame: FrameType | None) -> None:
    now = time.monotonic()
    if _state.number is None:
        _state.number, _state.at = number, now
        if _state.is_deferred:
            return
    elif now - _state.at < REPEATED_S:
        return
    raise Stopped(_state.number)
