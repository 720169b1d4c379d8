"""Ends what is left of a run's cluster when its driver is gone, however that ended: `kill -9` too.

`python -I -S watch.py <session folder> <pipe>`, started by `session.py`. The driver holds the other end of the pipe. It
writes a byte when it begins to leave; when the pipe closes, it is gone. The module imports nothing of the suite, so it
starts at once and is small.

A process belongs to the cluster when its environment names the session folder, or when it writes to a file there: Ray's
workers overwrite their environment with their title, but have a log in the folder. Who their parent is does not
matter.
"""

from __future__ import annotations

import contextlib
import os
import select
import shutil
import signal
import sys
import time
from pathlib import Path

MARK = "RLHF_SUITE_SESSION"  # in the environment of every process of a cluster: its session folder
LEAVE_S = 10.0  # how long the driver may take to leave its cluster before the cluster's processes are killed
GONE_S = 10.0  # how long killed processes are waited for
POLL_S = 0.05


def watch(folder: Path, pipe: int) -> None:
    """Wait for the driver's end, then clear `folder`; kill its processes earlier when the driver cannot leave them."""
    driver = os.getppid()
    signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGTERM, signal.SIGUSR2, signal.SIGINT, signal.SIGHUP))
    if os.read(pipe, 1):
        leaves, _, _ = select.select([pipe], [], [], LEAVE_S)
        if not leaves:
            end_members(folder, spared=driver)
        os.read(pipe, 1)
    clear(folder, spared=driver)


def clear(folder: Path, spared: int = 0) -> None:
    """Kill the processes of the session, but not process `spared`, and remove its folder.

    The driver is spared: it keeps Ray's log of its own open when it has left the cluster and goes on.
    """
    end_members(folder, spared)
    shutil.rmtree(folder, ignore_errors=True)


def end_members(folder: Path, spared: int = 0) -> None:
    """SIGKILL every other process of the session, stopped ones too, until none is left or `GONE_S` have passed."""
    deadline = time.monotonic() + GONE_S
    while (found := members(folder) - {spared}) and time.monotonic() < deadline:
        for pid in found:
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(POLL_S)


def members(folder: Path) -> set[int]:
    """The processes of the session, this one aside; zombies do not count."""
    found = set()
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it ended, or belongs to another user
            if int(entry.name) != os.getpid() and (is_marked(entry, folder) or writes_into(entry, folder)):
                found.add(int(entry.name))
    return found


def is_marked(process: Path, folder: Path) -> bool:
    return f"{MARK}={folder}".encode() in (process / "environ").read_bytes().split(b"\0")


def writes_into(process: Path, folder: Path) -> bool:
    """Whether the process has a file of the folder open for writing."""
    write = 0o200
    for link in (process / "fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # closed meanwhile
            if link.lstat().st_mode & write and link.readlink().is_relative_to(folder):
                return True
    return False


if __name__ == "__main__":
    watch(Path(sys.argv[1]), int(sys.argv[2]))
