"""Watch the memory of jailed processes from outside, for where the kernel counts it for nobody.

Resource limits bound each process of a session; the watcher bounds their sum. It looks ten times a second, so a session
may exceed its limit for a moment. Files that a session wrote to its folder come on top of its memory, up to `disk_mb`.
"""

from __future__ import annotations

import resource
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

EVERY_S = 0.1
PAGE = resource.getpagesize()


@dataclass(frozen=True, eq=False)
class Watched:
    """A session, as far as its memory goes. `kill` ends it, and is given the reason."""

    pid: int  # of its first process
    folder: str | None  # of a bare session, whose files count; None: it has a root of its own
    memory_mb: int
    disk_mb: int
    kill: Callable[[str], None]


class Watcher:
    """Kills a session whose processes together hold more memory, or a bare one whose files hold more, than it may."""

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.sessions: set[Watched] = set()
        self.thread: threading.Thread | None = None

    def add(self, session: Watched) -> None:
        """Watch a session from now on. The thread starts with the first one, again in a fork of this process."""
        with self.changed:
            self.sessions.add(session)
            if self.thread is None or not self.thread.is_alive():
                self.thread = threading.Thread(target=self._watch, name="sandbox memory", daemon=True)
                self.thread.start()
            self.changed.notify()

    def remove(self, session: Watched) -> None:
        """Stop watching a session."""
        with self.changed:
            self.sessions.discard(session)

    def _watch(self) -> None:
        while True:
            with self.changed:
                self.changed.wait_for(lambda: self.sessions)
                sessions = list(self.sessions)
            for session in sessions:
                if (why := excess(session)) is not None:
                    session.kill(why)
            time.sleep(EVERY_S)


watcher = Watcher()


def excess(session: Watched) -> str | None:
    """Return what a session holds too much of, or None."""
    pids = family(session.pid)
    if session.folder is None:
        pids = pids[1:]  # the first process of the namespace is our guard
    limit = session.memory_mb << 20
    used = sum(map(resident, pids))
    if used > limit and (used := sum(map(proportional, pids))) > limit:
        return f"it used {used >> 20} MiB of memory; its limit is {limit >> 20} MiB"
    if session.folder is not None and (written := on_disk(session.folder)) > session.disk_mb << 20:
        return f"it wrote {written >> 20} MiB to its folder; its limit is {session.disk_mb} MiB"
    return None


def family(pid: int) -> list[int]:
    """Return a process and all that come of it. Orphans of a namespace are children of its first process."""
    found, waiting = list[int](), [pid]
    while waiting:
        found.append(waiting.pop())
        with suppress(OSError):
            for task in Path(f"/proc/{found[-1]}/task").iterdir():
                with suppress(OSError):
                    waiting += map(int, (task / "children").read_text().split())
    return found


def resident(pid: int) -> int:
    """Return the memory of a process in bytes: cheap, but what it shares with others is counted in each of them."""
    with suppress(OSError, IndexError):
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * PAGE
    return 0


def proportional(pid: int) -> int:
    """Return the memory of a process in bytes, what it shares divided among those who share it.

    A process that hides (PR_SET_DUMPABLE) is counted in full.
    """
    with suppress(OSError):
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
        return sum(int(line.split()[1]) for line in lines if line.startswith(("Pss:", "SwapPss:"))) << 10
    return resident(pid)


def on_disk(folder: str) -> int:
    """Return the bytes that the files in a folder take. A deleted file that is open is not seen."""
    with suppress(OSError):
        return sum(path.lstat().st_blocks * 512 for path in Path(folder).rglob("*"))
    return 0
