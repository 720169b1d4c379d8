"""Start a command in a process that ends it, and all that has come of it: its reaper.

What a command has started may clear its environment, leave its process group and lose its parents. It stays below the
reaper in the tree of processes (PR_SET_CHILD_SUBREAPER), and there the reaper finds it. All of it is killed when
the command has ended, when whoever started the reaper closes its end of a pipe, and when that process itself ends.

Only a command that kills its own reaper escapes, which nothing but a jail or a container can prevent.
"""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from rlhf_suite.sandbox import kernel
from rlhf_suite.sandbox.memory import family
from rlhf_suite.sandbox.template import collect

SOURCES = Path(__file__).resolve().parents[2]
LAUNCH = "import sys; sys.path.insert(0, {!r}); from rlhf_suite.sandbox.{} import run_here; run_here()"
END_S = 5.0  # for what is killed to be gone
CLEAR_S = 20.0  # for the command that clears up
KILLED = 128 + signal.SIGKILL  # the exit code of a command that was killed


class Line:
    """A pipe that a reaper watches: all that it has started ends when our end is closed."""

    def __init__(self) -> None:
        self.theirs, self.ours = os.pipe()
        self.lock = threading.Lock()

    def close(self) -> None:
        """End the command and all that has come of it. Any thread may say so, and more than once."""
        with self.lock:
            if self.ours >= 0:
                os.close(self.ours)
                self.ours = -1


def launch(module: str, *arguments: str) -> list[str]:
    """Return the command of a process that runs `run_here` of a module of this package."""
    return [sys.executable, "-IS", "-c", LAUNCH.format(str(SOURCES), module), *arguments]


def with_reaper(command: Sequence[str], line: int, clear: Sequence[str] = ()) -> list[str]:
    """Return `command` below a reaper, which inherits the end `line` of a pipe. It runs the command
    `clear` when all else is over."""
    return launch("reaper", json.dumps({"line": line, "command": list(command), "clear": list(clear)}))


def run_here() -> None:
    """Be the reaper that `with_reaper` says, and end as its command does: with its exit code, or with 128 and the
    number of the signal that ended it."""
    options = json.loads(sys.argv[1])
    os.set_inheritable(options["line"], False)
    kernel.check(kernel.prctl(kernel.SUBREAPER, 1), "prctl(PR_SET_CHILD_SUBREAPER)")
    try:
        code = run_to_end(options["line"], options["command"])
    finally:
        end_all()
        if options["clear"]:
            with suppress(OSError, subprocess.SubprocessError):
                subprocess.run(
                    options["clear"],
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.DEVNULL,
                    timeout=CLEAR_S,
                    check=False,
                )
    os._exit(code)


def run_to_end(line: int, command: Sequence[str]) -> int:
    """Run a command until it ends, or until the other end of `line` is closed. Return its exit code."""
    wake, woken = os.pipe()
    os.set_blocking(woken, False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(woken, warn_on_full_buffer=False)
    try:
        child = os.posix_spawnp(command[0], list(command), os.environ, setsid=True, setsigdef=[signal.SIGPIPE])
    except OSError as error:
        sys.stderr.write(f"{command[0]}: {error.strerror}\n")
        return 127
    poller = select.poll()
    poller.register(wake, select.POLLIN)
    poller.register(line, 0)  # the end of a pipe is always reported
    while True:
        if any(descriptor == line for descriptor, _ in poller.poll()):
            return KILLED
        os.read(wake, 1 << 10)
        if (status := collect(child)) is not None:
            return exit_code(status)


def exit_code(status: int) -> int:
    """Return the exit code that stands for the status of a process, as shells say it."""
    code = os.waitstatus_to_exitcode(status)
    return code if code >= 0 else 128 - code


def end_all() -> None:
    """Kill all processes below this one. One that starts others meanwhile is found in the next round."""
    limit = time.monotonic() + END_S
    while (left := family(os.getpid())[1:]) and time.monotonic() < limit:
        for pid in left:
            with suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        collect(0)
        time.sleep(0.001)
