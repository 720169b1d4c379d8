"""A child process that never outlives its parent, and a lock that lives as long as either of them."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from rlhf_suite.errors import RunError
from rlhf_suite.launch.stop import Stopped, stoppable
from rlhf_suite.locks import lock
from rlhf_suite.polling import poll_until

PR_SET_PDEATHSIG = 1  # <linux/prctl.h>
POLL_S = 0.1


def kill_with_parent(parent: int) -> None:
    """From now on this process is killed when its parent, process `parent`, is gone, however that ended."""
    if ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL):
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")
    if os.getppid() != parent:  # it went before the kernel was asked
        os.kill(os.getpid(), signal.SIGKILL)


def run_child(command: Sequence[str], keep: Sequence[int] = ()) -> int:
    """Run a command that shares this console and inherits the descriptors `keep`; returns its exit code.

    It is a process group of its own, so that Ctrl-C reaches it once: the signal that ends this process (SIGINT, or one
    of `stop.SIGNALS`) is passed on to it, and it is waited for until it has saved and ended.
    """
    with stoppable():
        process = subprocess.Popen(command, pass_fds=keep, process_group=0)
        try:
            return process.wait()
        except (Stopped, KeyboardInterrupt) as end:
            process.send_signal(end.number if isinstance(end, Stopped) else signal.SIGINT)
            process.wait()
            raise
        except BaseException:
            process.kill()
            process.wait()
            raise


@contextmanager
def exclusive_lock(path: Path, wait_s: float) -> Iterator[int]:
    """Hold the lock file `path` for the block; yields a descriptor that holds it too wherever it is inherited.

    Whoever has the lock gets `wait_s` seconds to go, since the children of a killed process take a moment to follow it.

    Raises:
        RunError: the lock is still held after that.
    """
    with path.open("a") as file:
        if not poll_until(lambda: lock(file), wait_s, POLL_S):
            raise RunError(f"another process works in {path.parent} (it holds {path.name}): wait for its end")
        yield file.fileno()
