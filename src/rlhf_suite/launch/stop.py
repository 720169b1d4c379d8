"""Stop a run on SIGTERM, SIGUSR2 or SIGHUP: its loop checks for the request after every step, saves, and ends.

Slurm sends SIGUSR2 before the time limit and SIGTERM at a preemption; `docker stop` and `timeout` send SIGTERM; a
terminal that closes sends SIGHUP. Inside `defer_signals` the first signal is only recorded: the loop reads it with
`get_stop_signal` after its current step, saves a checkpoint and raises `Stopped`. A second signal raises `Stopped` at
once. So does a first signal outside `defer_signals`, for example during the start, when there is nothing to save.

SIGINT raises KeyboardInterrupt at once. A library may swallow it (an import that may fail does), so the loop's question
after its step raises it again.

Python runs a handler between two instructions of the main thread, which may be a long way off: in a product of
matrices, or in a `finally` that waits for a reward. So a thread of its own hears of each signal too (`Hearer`). It
answers on the console at once, and where the process is still there END_S after a second signal, it records that the
run was stopped and ends the process. Its children follow it: each of them watches its parent.
"""

from __future__ import annotations

import atexit
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import NoReturn

SIGNALS = (signal.SIGTERM, signal.SIGUSR2, signal.SIGHUP)
# `timeout` signals the process and then its group: a signal that follows within this time is the same request.
REPEATED_S = 1.0
END_S = 3.0  # that a process may take to close what it has open, after the second signal
LEAVE_S = 5.0  # for the interpreter to end, after a run that was stopped or failed


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
    hearer: Hearer | None = None
    is_interrupted = False  # by SIGINT
    is_passed_on = False  # a child process gets the signals too, and answers them
    at_the_end: tuple[Callable[[Stopped], object], ...] = ()  # what records a process that is ended at once


class Hearer:
    """A thread that hears of each signal as soon as it arrives, whatever the main thread does."""

    def __init__(self) -> None:
        from rlhf_suite.tracking.console import show_line  # here: the main thread may be in an import when it is needed

        self.show = show_line
        self.number: int | None = None
        self.at, self.is_closed = 0.0, threading.Event()
        self.reading, self.writing = os.pipe()
        os.set_blocking(self.writing, False)
        self.before = signal.set_wakeup_fd(self.writing, warn_on_full_buffer=False)
        self.thread = threading.Thread(target=self._listen, name="signals", daemon=True)
        self.thread.start()

    def close(self) -> None:
        """Hear no more, and end nothing: the block is over, and whoever called it goes on."""
        self.is_closed.set()
        signal.set_wakeup_fd(self.before)
        os.close(self.writing)
        if self.thread.is_alive():  # what has arrived is answered; in a forked process there is no such thread
            self.thread.join(END_S)

    def _listen(self) -> None:
        with open(self.reading, "rb", buffering=0) as pipe:  # noqa: PTH123 - a descriptor
            while numbers := pipe.read(1):
                if numbers[0] in (signal.SIGINT, *SIGNALS):
                    self.hear(numbers[0])

    def hear(self, number: int) -> None:
        """Answer a signal: the first one on the console, the second one by the end of the process."""
        now, name = time.monotonic(), signal.Signals(number).name
        if self.number is None:
            self.number, self.at = number, now
            if not _state.is_passed_on:
                self.say(f"{name}: {what_follows(number)}; a second signal ends it at once")
        elif now - self.at >= REPEATED_S:
            self.at = now
            self.say(f"{name} again: the run ends at once")
            self.end_after(2 * END_S if _state.is_passed_on else END_S)

    def say(self, text: str) -> None:
        """Print a line about a signal, if there is still a console."""
        with suppress(Exception):
            self.show(text, to_stderr=True)

    def end_after(self, seconds: float) -> None:
        """End the process in so many seconds, unless it has ended by itself."""
        if self.is_closed.wait(seconds):
            return
        stop = Stopped(self.number or signal.SIGTERM)
        for record in _state.at_the_end:
            with suppress(Exception):  # such as a full disk: the process must end
                record(stop)
        os._exit(128 + stop.number)


def what_follows(number: int) -> str:
    """Return what a run does about a first signal."""
    if _state.is_deferred and number != signal.SIGINT:
        return "the run stops after this step and saves it"
    return "the run ends"


_state = _State()


def get_stop_signal() -> int | None:
    """Return the signal that asked this run to stop, or None if there was none.

    Raises:
        KeyboardInterrupt: SIGINT has raised it before, and a library has swallowed it.
    """
    if _state.is_interrupted:
        raise KeyboardInterrupt
    return _state.number


@contextmanager
def stoppable() -> Iterator[None]:
    """Handle the signals as described above during the block, then restore the earlier handlers."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, _receive) for number in SIGNALS if not is_ignored(number)}
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        before[signal.SIGINT] = signal.signal(signal.SIGINT, _interrupt)
    if _state.depth == 0:
        _state.hearer = Hearer()
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
            _state.number, _state.is_interrupted = None, False
            _close_hearer()
        for number, handler in before.items():
            signal.signal(number, handler if handler is not None else signal.SIG_DFL)


def _close_hearer() -> None:
    """Hear of no further signals, also in a process that was forked in a `stoppable` block."""
    hearer, _state.hearer = _state.hearer, None
    if hearer is not None:
        hearer.close()


os.register_at_fork(after_in_child=_close_hearer)  # what a child is sent is not for its parent


def hear(number: int) -> None:
    """Take note of a signal whose handler is that of a library."""
    if _state.hearer is not None:
        _state.hearer.hear(number)


@contextmanager
def record_end(record: Callable[[Stopped], object]) -> Iterator[None]:
    """Call `record` in the thread that ends this process at once, if a second signal asks for that in the block."""
    before, _state.at_the_end = _state.at_the_end, (record, *_state.at_the_end)
    try:
        yield
    finally:
        _state.at_the_end = before


@contextmanager
def leave_to_child() -> Iterator[None]:
    """Leave the answer to the first signal to a child process that gets it too, and more time to the end."""
    before, _state.is_passed_on = _state.is_passed_on, True
    try:
        yield
    finally:
        _state.is_passed_on = before


def leave(code: int) -> NoReturn:
    """End this process, in its main thread: do what is registered for its end, and write what is buffered.

    Threads that a library or the user's code has left hold it only after a success: after another end the interpreter
    would wait for them without a limit. A signal that arrives now has nothing left to end: Python's own handler would
    show a traceback of whatever cleans up. The interpreter is not taken apart: compiled libraries whose objects live
    until then (those of xgrammar and Triton) would print dozens of lines about them.
    """
    for number in (signal.SIGINT, *SIGNALS):
        signal.signal(number, signal.SIG_IGN)

    def end(after_s: float) -> None:
        time.sleep(after_s)
        for stream in (sys.stdout, sys.stderr):
            with suppress(OSError, ValueError):  # nobody reads it any more, or it is closed
                stream.flush()
        os._exit(code)

    if code:
        threading.Thread(target=end, args=(LEAVE_S,), name="leaving", daemon=True).start()
    else:
        # As Python itself: pools of concurrent.futures are told to end, then all threads but daemons are waited for.
        threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    end(0)
    raise AssertionError("the process has ended")


@contextmanager
def defer_signals() -> Iterator[None]:
    """Only record a first signal during the block, for a loop that calls `get_stop_signal` after every step."""
    before, _state.is_deferred = _state.is_deferred, True
    try:
        yield
    finally:
        _state.is_deferred = before


@contextmanager
def block_signals() -> Iterator[None]:
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


def is_ignored(number: int) -> bool:
    """Return whether the user wants to ignore the signal, as `nohup` does with SIGHUP."""
    return number == signal.SIGHUP and signal.getsignal(number) == signal.SIG_IGN


def _interrupt(_number: int, _frame: FrameType | None) -> None:
    """Handle SIGINT as Python does, and remember it."""
    _state.is_interrupted = True
    raise KeyboardInterrupt


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
