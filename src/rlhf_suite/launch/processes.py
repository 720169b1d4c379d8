"""A child process that never outlives its parent, and a lock that lives as long as either of them."""

from __future__ import annotations

import ctypes
import fcntl
import os
import signal
import subprocess
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

from rlhf_suite.errors import RunError

PR_SET_PDEATHSIG = 1  # <linux/prctl.h>
STOP_S = 60.0
POLL_S = 0.1


def end_with(parent: int) -> None:
    """From now on this process is killed when its parent, process `parent`, is gone, however that ended."""
    if ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL):
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")
    if os.getppid() != parent:  # it went before the kernel was asked
        os.kill(os.getpid(), signal.SIGKILL)


def run_child(command: Sequence[str], keep: Sequence[int] = ()) -> int:
    """Run a command that shares this console and inherits the descriptors `keep`; returns its exit code.

    It is a process group of its own, so that Ctrl-C reaches it once: what ends this process (SIGINT, SIGTERM) is passed
    on to it, and it is waited for.
    """
    with terminable():
        process = subprocess.Popen(command, pass_fds=keep, process_group=0)
        try:
            return process.wait()
        except BaseException as end:
            process.send_signal(signal.SIGINT if isinstance(end, KeyboardInterrupt) else signal.SIGTERM)
            try:
                process.wait(STOP_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            raise


@contextmanager
def sole(path: Path, wait_s: float) -> Iterator[int]:
    """Hold the lock file `path` for the block; yields a descriptor that holds it too wherever it is inherited.

    Whoever has the lock gets `wait_s` seconds to go, since the children of a killed process take a moment to follow it.

    Raises:
        RunError: the lock is still held after that.
    """
    with path.open("a") as file:
        deadline = time.monotonic() + wait_s
        while not _locked(file.fileno()):
            if time.monotonic() > deadline:
                raise RunError(f"another process works in {path.parent} (it holds {path.name}): wait for its end")
            time.sleep(POLL_S)
        yield file.fileno()


def _locked(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


@contextmanager
def terminable() -> Iterator[None]:
    """SIGTERM becomes SystemExit in the block, which passes through every `finally`."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    received = []

    def leave(number: int, _frame: FrameType | None) -> None:
        received.append(number)
        raise SystemExit(128 + number)

    before = signal.signal(signal.SIGTERM, leave)
    try:
        yield
    except SystemExit as error:
        if received:  # inside a call of Ray's the exit code is lost
            error.code = 128 + received[0]
        raise
    finally:
        signal.signal(signal.SIGTERM, before if before is not None else signal.SIG_DFL)
