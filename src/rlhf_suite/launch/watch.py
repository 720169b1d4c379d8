"""The watcher of a run's cluster: it kills what is left of the cluster when the driver has ended, even by `kill -9`.

`session.py` starts `python -I -S watch.py <session folder> <pipe>`. The driver holds the other end of the pipe. It
writes a byte when it begins to leave the cluster. The pipe closes when the driver ends. This file imports nothing of
the suite, so that it starts fast and needs little memory.

A process belongs to the cluster if its environment names the session folder, or if it has a file there open for
writing. The second test is needed because Ray's workers overwrite their environment with their title; they have a log
in the folder. The parent of a process does not matter.
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

MARK = "RLHF_SUITE_SESSION"  # environment variable of every process of a cluster; its value is the session folder
LEAVE_S = 10.0  # how long the driver may take to leave its cluster before the processes of the cluster are killed
GONE_S = 10.0  # how long to wait until killed processes have ended
POLL_S = 0.05


def watch(folder: Path, pipe: int) -> None:
    """Wait until the driver ends, then clear `folder`. Kill the processes earlier if the driver hangs while it
    leaves.
    """
    driver = os.getppid()
    signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGTERM, signal.SIGUSR2, signal.SIGINT, signal.SIGHUP))
    if os.read(pipe, 1):
        leaves, _, _ = select.select([pipe], [], [], LEAVE_S)
        if not leaves:
            end_members(folder, spared=driver)
        os.read(pipe, 1)
    clear(folder, spared=driver)


def clear(folder: Path, spared: int = 0) -> None:
    """Kill the processes of the session except process `spared`, and remove the session folder.

    The driver is spared: after it has left the cluster it goes on, with its own log of Ray still open.
    """
    end_members(folder, spared)
    shutil.rmtree(folder, ignore_errors=True)


def end_members(folder: Path, spared: int = 0) -> None:
    """Send SIGKILL to the processes of the session, stopped ones too, until all have ended or `GONE_S` have passed."""
    deadline = time.monotonic() + GONE_S
    while (left := members(folder) - {spared}) and time.monotonic() < deadline:
        for pid in left:
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(POLL_S)


def members(folder: Path) -> set[int]:
    """Return the ids of the processes of the session, without this process and without zombies."""
    ids, real = set(), folder.resolve()  # the folder for temporary files may be a link; the kernel names no links
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it ended, or belongs to another user
            if int(entry.name) != os.getpid() and (is_marked(entry, folder) or writes_into(entry, real)):
                ids.add(int(entry.name))
    return ids


def is_marked(process: Path, folder: Path) -> bool:
    """Return whether the environment of a process names the session folder."""
    return f"{MARK}={folder}".encode() in (process / "environ").read_bytes().split(b"\0")


def writes_into(process: Path, folder: Path) -> bool:
    """Return whether the process has a file in the folder, which is given without links, open for writing."""
    write = 0o200
    for link in (process / "fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # the file was closed in the meantime
            if link.lstat().st_mode & write and link.readlink().is_relative_to(folder):
                return True
    return False


if __name__ == "__main__":
    watch(Path(sys.argv[1]), int(sys.argv[2]))
