"""The private folder of a run's Ray cluster, and the promise that folder and processes end with the run.

Ray gives its own temporary folder mode 0777, so it stands inside one that only this user can enter. Whatever the
cluster's processes put into TMPDIR is in the session folder too. A watcher (`watch.py`) clears all of it when the
driver is killed; what nobody could clear, the next run on this machine does.
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
from rlhf_suite.launch.stop import signals_blocked

PREFIX = "rs-"
LOCK = "lock"
# Ray's longest socket is `<temp>/session_<26 characters>_<pid>/sockets/plasma_store`, and a path of a socket ends at
# 107 bytes. `<temp>` is `<root>/rs-<8 characters>/r`.
MAX_ROOT_BYTES = 107 - 64 - len("/rs-12345678/r")
WATCHER_S = 30.0


@dataclass(frozen=True)
class Session:
    """The folder of one cluster on one machine, and the pipe to its watcher."""

    folder: Path
    pipe: int

    @property
    def ray(self) -> Path:
        """Where Ray's own folder is."""
        return self.folder / "r"

    @property
    def environment(self) -> dict[str, str]:
        """What every process of the cluster is started with: the mark by which it is found, and where its files go."""
        return {watch.MARK: str(self.folder), "TMPDIR": str(self.folder / "tmp")}

    def leave(self) -> None:
        """Tell the watcher that the cluster is being left: it kills what does not end within `watch.LEAVE_S`."""
        os.write(self.pipe, b".")


def root_problem() -> str | None:
    """Why the folder for temporary files cannot hold Ray's sockets; None when it can."""
    root = tempfile.gettempdir()
    if not root.isascii():
        return f"{root} has characters other than ASCII, and Ray needs ASCII paths"
    if len(root) > MAX_ROOT_BYTES:
        return f"{root} has {len(root)} characters; Ray's sockets leave room for {MAX_ROOT_BYTES}"
    return None


@contextmanager
def session() -> Iterator[Session]:
    """A session folder of this process for the block; at its end all processes that belong to it are killed."""
    root = Path(tempfile.gettempdir())
    clear_abandoned(root)
    folder = Path(tempfile.mkdtemp(prefix=PREFIX, dir=root))  # 0700, and nobody else can have made it
    (folder / "tmp").mkdir()
    new = folder / f"{LOCK}.new"
    new.touch()
    with new.open() as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        new.rename(folder / LOCK)  # from here on others look whether it is held
        watcher, pipe = _start_watcher(folder, lock.fileno())
        try:
            yield Session(folder, pipe)
        finally:
            watch.clear(folder)
            os.close(pipe)
            with suppress(subprocess.TimeoutExpired):
                watcher.wait(WATCHER_S)


def clear_abandoned(root: Path) -> None:
    """Clear the sessions of this user whose drivers and watchers are dead: nobody holds their lock any more."""
    for folder in root.glob(f"{PREFIX}*"):
        with suppress(OSError):  # another user's, gone by now, or just being made
            if not folder.is_symlink() and folder.stat().st_uid == os.getuid() and _is_abandoned(folder / LOCK):
                watch.clear(folder)


def _is_abandoned(lock: Path) -> bool:
    descriptor = os.open(lock, os.O_RDWR | os.O_NOFOLLOW)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    finally:
        os.close(descriptor)
    return True


def _start_watcher(folder: Path, lock: int) -> tuple[subprocess.Popen[bytes], int]:
    """The watcher, which holds the lock too, and this process's end of the pipe to it."""
    theirs, ours = os.pipe()
    command = [sys.executable, "-I", "-S", watch.__file__, str(folder), str(theirs)]
    with signals_blocked():
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
    """Set environment variables for the block (Ray's daemons and actors inherit them) and put the old ones back."""
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
