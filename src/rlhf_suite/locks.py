"""Locks on files: held by a process for as long as it lives, gone with it however it ends, on every node.

They are advisory locks of the operating system. On NFS the server keeps them, so other nodes see them too. Some file
systems have no locks: there everybody gets one.
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

NO_LOCKS = (errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK)
POLL_S = 0.1
ORPHAN_S = 10.0  # a killed process may have forked children that hold its lock for a moment
LOCK = "run.lock"


class InUse(UserError):
    """Another process works in a folder; the message says which."""


def lock(file: IO[Any], shared: bool = False) -> bool:
    """Lock an open file without waiting; whether that worked, or the file system has no locks."""
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
    """Hold a folder for this process; `run.lock` in it says who has it. Errors call it `name`.

    Raises:
        InUse: another process has it. A process of this machine that has ended does not.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / LOCK).open("a+") as file:
        deadline = time.monotonic() + ORPHAN_S
        while not lock(file):
            holder = read(file)
            if is_alive(holder) or time.monotonic() > deadline:
                raise InUse(f"{name}: another run works there ({described(holder)}). Wait for its end, or stop it")
            time.sleep(POLL_S)
        file.truncate(0)
        started = time.strftime("%Y-%m-%d %H:%M:%S")
        json.dump({"host": socket.gethostname(), "pid": os.getpid(), "started": started}, file)
        file.flush()
        yield


def holder_of(folder: Path) -> str | None:
    """Who works in a folder, in words; None when nobody does."""
    if not (folder / LOCK).exists():
        return None
    with (folder / LOCK).open() as file:
        return None if lock(file, shared=True) else described(read(file))


def read(file: IO[str]) -> dict[str, Any]:
    """Who wrote the lock file; empty while somebody is just writing it."""
    file.seek(0)
    try:
        holder = json.loads(file.read())
    except ValueError:
        return {}
    return holder if isinstance(holder, dict) else {}


def is_alive(holder: dict[str, Any]) -> bool:
    """Whether the process may still be there: on another machine that cannot be seen."""
    return holder.get("host") != socket.gethostname() or Path(f"/proc/{holder.get('pid')}").exists()


def described(holder: dict[str, Any]) -> str:
    if not holder:
        return "another process"
    return f"process {holder.get('pid')} on {holder.get('host')}, since {holder.get('started')}"
