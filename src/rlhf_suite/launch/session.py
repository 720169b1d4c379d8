"""The session of a Ray cluster on one machine: a private folder, and processes, that never outlive the run.

Ray gives its temporary folder the mode 0777, so this folder is put inside one that only this user can enter. Files that
processes of the cluster write to TMPDIR are in the session folder too. A watcher (`watch.py`) clears the session when
the driver is killed. If the watcher is killed too, the next run on this machine clears the session.
"""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from rlhf_suite.launch import watch
from rlhf_suite.launch.stop import block_signals

PREFIX = "rs-"
LOCK = "lock"
# The longest socket path of Ray is `<temp>/session_<26 characters>_<pid>/sockets/plasma_store`, and the path of a
# socket may have 107 bytes. `<temp>` is `<root>/rs-<8 characters>/r`.
MAX_ROOT_BYTES = 107 - 64 - len("/rs-12345678/r")
WATCHER_S = 30.0


@dataclass(frozen=True)
class Session:
    """The folder of one cluster on one machine, and the pipe to its watcher."""

    folder: Path
    pipe: int

    @property
    def ray(self) -> Path:
        """Return the path of the temporary folder of Ray."""
        return self.folder / "r"

    @property
    def environment(self) -> dict[str, str]:
        """Return the environment variables of all processes of the cluster: the mark that finds them, and TMPDIR."""
        return {watch.MARK: str(self.folder), "TMPDIR": str(self.folder / "tmp")}

    def leave(self) -> None:
        """Tell the watcher that the driver is leaving, so that it kills what has not ended after `watch.LEAVE_S`."""
        os.write(self.pipe, b".")


def root_problem() -> str | None:
    """Return why the folder for temporary files cannot hold the sockets of Ray, or None if it can."""
    root = tempfile.gettempdir()
    if not root.isascii():
        return f"{root} has characters other than ASCII, and Ray needs ASCII paths"
    if len(root) > MAX_ROOT_BYTES:
        return f"{root} has {len(root)} characters; Ray's sockets leave room for {MAX_ROOT_BYTES}"
    return None


@contextmanager
def session() -> Iterator[Session]:
    """Make a session for the block. After the block, kill all processes that belong to it and remove its folder."""
    root = Path(tempfile.gettempdir())
    clear_abandoned(root)
    folder = Path(tempfile.mkdtemp(prefix=PREFIX, dir=root))  # mode 0700, and no other user can have made it
    (folder / "tmp").mkdir()
    new = folder / f"{LOCK}.new"
    new.touch()
    with new.open() as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        new.rename(folder / LOCK)  # from here on, other runs test whether the lock is held
        watcher, pipe = _start_watcher(folder, lock.fileno())
        try:
            yield Session(folder, pipe)
        finally:
            watch.clear(folder)
            os.close(pipe)
            with suppress(subprocess.TimeoutExpired):
                watcher.wait(WATCHER_S)


def clear_abandoned(root: Path) -> None:
    """Clear the sessions of this user whose driver and watcher have ended, so that no process holds their lock."""
    for folder in root.glob(f"{PREFIX}*"):
        with suppress(OSError):  # it belongs to another user, has just been removed, or is being made
            if not folder.is_symlink() and folder.stat().st_uid == os.getuid() and _is_abandoned(folder / LOCK):
                watch.clear(folder)


def _is_abandoned(lock: Path) -> bool:
    """Return whether no process holds the lock of a session."""
    descriptor = os.open(lock, os.O_RDWR | os.O_NOFOLLOW)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    finally:
        os.close(descriptor)
    return True


def _start_watcher(folder: Path, lock: int) -> tuple[subprocess.Popen[bytes], int]:
    """Start the watcher, which holds the lock too. Return it and the end of the pipe that this process writes to."""
    theirs, ours = os.pipe()
    command = [sys.executable, "-I", "-S", watch.__file__, str(folder), str(theirs)]
    with block_signals():
        watcher = subprocess.Popen(
            command,
            pass_fds=(theirs, lock),
            start_new_session=True,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
    os.close(theirs)
    return watcher, ours


@contextmanager
def environment(values: Mapping[str, str]) -> Iterator[None]:
    """Set environment variables for the block, which daemons and actors of Ray inherit; then restore the old values."""
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
