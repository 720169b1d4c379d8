"""A child process that never outlives its parent, a lock that is held until both have ended, memory that a process
keeps, and what a command prints."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from rlhf_suite.errors import RunError
from rlhf_suite.launch.stop import END_S, Stopped, leave_to_child, stoppable
from rlhf_suite.locks import lock
from rlhf_suite.polling import poll_until

PR_SET_PDEATHSIG = 1  # <linux/prctl.h>
POLL_S = 0.1
SHELL = "/bin/sh"  # that runs commands of the user
# Environment variable of all that an episode worker starts; its value is the name of the worker.
OF_EPISODE_WORKER = "RLHF_SUITE_EPISODES"
# <malloc.h> of glibc
M_TRIM_THRESHOLD, M_MMAP_MAX = -1, -4
NEVER, NO_BLOCKS = -1, 0


def ask(command: Sequence[str], limit_s: float) -> str:
    """Return what a command of the system prints; "" if it cannot be started, or does not end within `limit_s`
    seconds."""
    with suppress(OSError, subprocess.TimeoutExpired):
        answer = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=limit_s, check=False)
        return answer.stdout
    return ""


def kill_with_parent(parent: int) -> None:
    """Have the kernel kill this process as soon as its parent, process `parent`, ends in any way."""
    if ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL):
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")
    if os.getppid() != parent:  # the parent ended before the kernel knew
        os.kill(os.getpid(), signal.SIGKILL)


def kill_marked(name: str, value: str) -> None:
    """Kill the processes of this machine, except this one, in whose environment the variable `name` has this value."""
    entry = f"{name}={value}".encode()
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # it ended, or belongs to another user
            if int(process.name) != os.getpid() and entry in (process / "environ").read_bytes().split(b"\0"):
                os.kill(int(process.name), signal.SIGKILL)


def run_child(command: Sequence[str], keep: Sequence[int] = ()) -> int:
    """Run a command that shares this console and inherits the file descriptors `keep`; return its exit code.

    The child has its own process group, so that Ctrl-C reaches it once: a signal that ends this process (SIGINT, or one
    of `stop.SIGNALS`) is passed on to the child. Then this process waits until the child has saved its state and ended.
    """
    with stoppable(), leave_to_child():
        process = subprocess.Popen(command, pass_fds=keep, process_group=0)
        try:
            return process.wait()  # no-limit: the child has its own
        except (Stopped, KeyboardInterrupt) as end:
            process.send_signal(number_of(end))
            end_with(process)
            raise
        except BaseException:
            process.kill()
            process.wait(END_S)
            raise


def end_with(process: subprocess.Popen[bytes]) -> None:
    """Wait until a child that was told to stop has ended. A second signal ends it at once."""
    try:
        process.wait()  # no-limit: the child finishes its step, unless there is a second signal
    except (Stopped, KeyboardInterrupt) as again:
        process.send_signal(number_of(again))
        with suppress(subprocess.TimeoutExpired):
            process.wait(1.5 * END_S)
        process.kill()
        raise


def number_of(end: Stopped | KeyboardInterrupt) -> int:
    """Return the number of the signal that ended this process."""
    return end.number if isinstance(end, Stopped) else signal.SIGINT


@contextmanager
def exclusive_lock(path: Path, wait_s: float) -> Iterator[int]:
    """Hold the lock file `path` for the block. Yield its file descriptor; a child that inherits it holds the lock too.

    If another process holds the lock, wait up to `wait_s` seconds, because the children of a killed process take a
    moment to end.

    Raises:
        RunError: another process still holds the lock after `wait_s` seconds.
    """
    with path.open("a", encoding="utf-8") as file:
        if not poll_until(lambda: lock(file), wait_s, POLL_S):
            raise RunError(f"another process works in {path.parent} (it holds {path.name}): wait until it ends")
        yield file.fileno()


def keep_freed_memory() -> None:
    """Let this process keep the memory that it frees, for its next arrays.

    By default glibc gives each array of over 32 MiB back to the kernel, and so does Arrow. The kernel then clears all
    pages of the next one, which takes longer than most arithmetic on it: on a rollout of 10^7 tokens, a third of the
    time of the driver. The process holds its peak until it ends. Under another C library only Arrow changes.
    """
    import pyarrow as pa

    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(M_MMAP_MAX, NO_BLOCKS)
        mallopt(M_TRIM_THRESHOLD, NEVER)
    pa.set_memory_pool(pa.system_memory_pool())
