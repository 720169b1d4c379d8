"""Locks on files: held by a process for as long as it lives, released however it ends, and seen by every node.

They are advisory locks of the operating system. On NFS the server keeps them, so other nodes see them too. Some file
systems have no locks: there every process gets the lock it asks for. (The package filelock fits less well: its lock
does not say who holds it, has no shared mode, and cannot be inherited by a child process.)
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from rlhf_suite.errors import UserError
from rlhf_suite.foreign_files import open_regular
from rlhf_suite.polling import poll_until

NO_LOCKS = (errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK)
POLL_S = 0.1
ORPHAN_S = 10.0  # a killed process may have forked children that hold its lock for a moment
LOCK, LOCK_BYTES = "run.lock", 1 << 16


class InUse(UserError):
    """Another process works in the folder; the message says which one."""


def lock(file: IO[Any], shared: bool = False) -> bool:
    """Lock an open file without waiting; return whether that worked (True also where the file system has no locks)."""
    try:
        fcntl.flock(file, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno not in NO_LOCKS:
            raise
    return True


@contextmanager
def alone_in(folder: Path, name: str) -> Iterator[None]:
    """Hold a folder for this process; `run.lock` in it says who holds it. Error messages call the folder `name`.

    Raises:
        InUse: another process holds it. A process of this machine that has ended does not count.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / LOCK).open("a+") as file:
        # The children of a killed process keep its lock for a moment; the lock of a living process is not waited for.
        if not lock(file) and (is_alive(read(file)) or not poll_until(lambda: lock(file), ORPHAN_S, POLL_S)):
            raise InUse(
                f"{name}: another run works there ({describe_holder(read(file))}). Wait for its end, or stop it"
            )
        file.truncate(0)
        started = time.strftime("%Y-%m-%d %H:%M:%S")
        json.dump({"host": socket.gethostname(), "pid": os.getpid(), "started": started}, file)
        file.flush()
        yield


def holder_of(folder: Path) -> str | None:
    """Return a description of the process that works in a folder, None when there is none."""
    if not (folder / LOCK).exists():
        return None
    with open_regular(folder / LOCK, LOCK_BYTES) as file:
        return None if lock(file, shared=True) else describe_holder(read(file))


def read(file: IO[Any]) -> dict[str, Any]:
    """Return what the holder wrote into the lock file, an empty table while it is still writing."""
    file.seek(0)
    try:
        holder = json.loads(file.read(LOCK_BYTES))
    except (ValueError, RecursionError):
        return {}
    return holder if isinstance(holder, dict) else {}


def is_alive(holder: dict[str, Any]) -> bool:
    """Return whether the process may still run; the processes of other machines count as running."""
    return holder.get("host") != socket.gethostname() or Path(f"/proc/{holder.get('pid')}").exists()


def describe_holder(holder: dict[str, Any]) -> str:
    """Return the holder of a lock in words."""
    if not holder:
        return "another process"
    return f"process {holder.get('pid')} on {holder.get('host')}, since {holder.get('started')}"
