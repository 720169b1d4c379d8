"""Watch the memory of jailed processes from outside, for where the kernel counts it for nobody.

Resource limits bound each process of a session; the watcher bounds their sum. It looks ten times a second, so a session
may exceed its limit for a moment. What is dear to count (mappings, locks, deleted files) it looks at once a second.
Files that a session wrote to its folder come on top of its memory, up to `disk_mb`.

Counted are the pages of every process, in memory and swapped out, its page tables, what its descriptors can hold
(sockets and pipes), and the kernel's memory of its mappings and file locks. `seccomp.py` refuses the calls by which
memory would belong to no process: shared pages without a file, pages in pipes, descriptors under way in sockets.
"""

from __future__ import annotations

import os
import secrets
import stat
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from rlhf_suite.sandbox.confine import FILE_BYTES, MAX_FILES

EVERY_S = 0.1
SLOW_EVERY_S = 1.0
FREE_DESCRIPTORS = 16  # of a process; they are its standard streams, its line, and a few files
DESCRIPTOR_BYTES = 212_992  # what a socket holds by Linux' default (net.core.wmem_default); a pipe holds less
MAPPING_BYTES = 1024  # of the kernel, for a mapping and what a fork adds to it
LOCK_BYTES = 256
MAX_DEPTH = 100  # folders of a bare session in one another
MAX_DISK_ENTRIES = 4096  # files and folders of a bare session, as many as others may have (`confine.py`)
PAGES_OF_A_PROCESS = (b"VmRSS:", b"VmSwap:", b"VmPTE:")


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
        slow_at = 0.0  # when to look slowly next
        while True:
            with self.changed:
                self.changed.wait_for(lambda: self.sessions)
                sessions = list(self.sessions)
            slowly = time.monotonic() >= slow_at
            for session in sessions:
                look_at(session, slowly)
            if slowly:
                slow_at = time.monotonic() + SLOW_EVERY_S
            time.sleep(EVERY_S)


watcher = Watcher()


def look_at(session: Watched, slowly: bool) -> None:
    """Kill a session that holds too much, or that cannot be looked at: other sessions must go on being watched."""
    try:
        why = excess(session, slowly)
    except Exception as error:
        why = f"its memory cannot be counted ({type(error).__name__})"
    if why is not None:
        session.kill(why)


def excess(session: Watched, slowly: bool = True) -> str | None:
    """Return what a session holds too much of, or None. `slowly` counts also what is dear to count."""
    pids = family(session.pid)
    if session.folder is None:
        pids = pids[1:]  # the first process of the namespace is our guard
    limit = session.memory_mb << 20
    dear = in_kernel(pids, limit) if slowly else 0
    used = dear + sum(map(resident, pids)) + sum(map(measure_descriptors, pids))
    if used > limit:
        used = dear + sum(map(proportional, pids)) + sum(map(measure_sockets, pids))
    if used > limit:
        return f"it used {used >> 20} MiB of memory; its limit is {limit >> 20} MiB"
    return None if session.folder is None else excess_on_disk(session, pids, slowly)


def excess_on_disk(session: Watched, pids: list[int], slowly: bool) -> str | None:
    """Return what a bare session has too much of on disk, or None."""
    written = count_deleted_bytes(pids) if slowly else 0
    try:
        for entries, size in enumerate(sizes_on_disk(str(session.folder)), 1):
            written += size
            if entries > MAX_DISK_ENTRIES:
                return f"it made more than {MAX_DISK_ENTRIES} files and folders"
    except RecursionError:
        return f"it put more than {MAX_DEPTH} folders in one another"
    if written > session.disk_mb << 20:
        return f"it wrote {written >> 20} MiB to its folder; its limit is {session.disk_mb} MiB"
    return None


def family(pid: int) -> list[int]:
    """Return a process and all that come of it. Orphans of a namespace are children of its first process."""
    pids, waiting = list[int](), [pid]
    while waiting:
        pids.append(waiting.pop())
        for task in tasks(pids[-1]):
            with suppress(OSError):
                waiting += map(int, Path(f"/proc/{pids[-1]}/task/{task}/children").read_text(encoding="utf-8").split())
    return pids


def tasks(pid: int) -> list[str]:
    """Return the threads of a process."""
    with suppress(OSError):
        return [path.name for path in Path(f"/proc/{pid}/task").iterdir()]
    return []


def resident(pid: int) -> int:
    """Return the memory of a process in bytes: cheap, but what it shares with others is counted in each of them.

    A process whose first thread has ended shows its memory in its other threads only.
    """
    return pages(pid) or max((pages(task) for task in tasks(pid)), default=0)


def pages(task: int | str) -> int:
    """Return the bytes of the pages and page tables that a thread sees, 0 where it has ended."""
    with suppress(OSError):
        lines = lines_of(f"/proc/{task}/status")
        return sum(int(line.split()[1]) for line in lines if line.startswith(PAGES_OF_A_PROCESS)) << 10
    return 0


def lines_of(path: str) -> list[bytes]:
    """Return the lines of a file of /proc. It may have names of processes and files, in which untrusted code may write
    anything. The kernel escapes their newlines, but none of the other characters that end a line for `splitlines`."""
    return Path(path).read_bytes().split(b"\n")[:-1]


def proportional(pid: int) -> int:
    """Return the memory of a process in bytes, what it shares divided among those who share it.

    A process that hides (PR_SET_DUMPABLE) is counted in full.
    """
    for task in (str(pid), *tasks(pid)):
        with suppress(OSError):
            if lines := lines_of(f"/proc/{task}/smaps_rollup"):
                return sum(int(line.split()[1]) for line in lines if line.startswith((b"Pss:", b"SwapPss:"))) << 10
    return resident(pid)


def measure_descriptors(pid: int) -> int:
    """Return what the descriptors of a process can hold at most, in bytes: cheap, as if all of them were sockets."""
    count = MAX_FILES
    with suppress(OSError):  # Linux 6.2 shows how many there are as the size of their folder
        count = Path(f"/proc/{pid}/fd").stat().st_size or MAX_FILES
    return max(count - FREE_DESCRIPTORS, 0) * DESCRIPTOR_BYTES


def measure_sockets(pid: int) -> int:
    """Return what the sockets and pipes of a process can hold, in bytes; those of one that hides may all be sockets."""
    try:
        count = sum(map(is_socket_or_pipe, Path(f"/proc/{pid}/fd").iterdir()))
    except FileNotFoundError:
        return 0
    except OSError:
        count = MAX_FILES
    return max(count - FREE_DESCRIPTORS, 0) * DESCRIPTOR_BYTES


def is_socket_or_pipe(path: Path) -> bool:
    with suppress(OSError):
        return str(path.readlink()).startswith(("socket:", "pipe:"))
    return False


def in_kernel(pids: list[int], enough: int) -> int:
    """Return the kernel's memory of the mappings and file locks of processes, in bytes; above `enough` it may stop."""
    used = locks_of(set(map(str, pids))) * LOCK_BYTES
    for pid in pids:
        used += mappings(pid, enough) * MAPPING_BYTES
        if used > enough:
            break
    return used


def mappings(pid: int, enough: int) -> int:
    """Return how many mappings a process has; it stops where they take more than `enough` bytes."""
    count = 0
    with suppress(OSError), Path(f"/proc/{pid}/maps").open("rb") as file:
        while (part := file.read(1 << 16)) and count * MAPPING_BYTES <= enough:
            count += part.count(b"\n")
    return count


def locks_of(pids: set[str]) -> int:
    """Return how many file locks processes hold."""
    with suppress(OSError):
        rows = (line.split() for line in Path("/proc/locks").read_text(encoding="utf-8").splitlines())
        return sum(row[4] in pids for row in rows if len(row) > 4)
    return 0


def count_deleted_bytes(pids: Iterable[int]) -> int:
    """Return the bytes of deleted files that processes have open; one that is only mapped counts as the largest."""
    used = 0
    for pid in pids:
        with suppress(OSError):
            for path in Path(f"/proc/{pid}/fd").iterdir():
                with suppress(OSError):
                    status = path.stat()
                    if stat.S_ISREG(status.st_mode) and status.st_nlink == 0:
                        used += status.st_blocks * 512
        with suppress(OSError):
            lines = lines_of(f"/proc/{pid}/maps")
            used += FILE_BYTES * len({line.split()[4] for line in lines if line.endswith(b" (deleted)")})
    return used


def sizes_on_disk(folder: str) -> Iterator[int]:
    """Yield the bytes that each file and folder below a folder takes.

    Raises:
        RecursionError: more than `MAX_DEPTH` folders are in one another.
    """
    waiting = [(folder, 0)]
    while waiting:
        place, depth = waiting.pop()
        if depth > MAX_DEPTH:
            raise RecursionError
        with suppress(OSError), os.scandir(place) as entries:
            for entry in entries:
                with suppress(FileNotFoundError):
                    yield entry.stat(follow_symlinks=False).st_blocks * 512
                    if entry.is_dir(follow_symlinks=False):
                        waiting.append((entry.path, depth + 1))


def remove_tree(folder: str) -> None:
    """Remove a folder that untrusted code has filled, however deep its folders are; what cannot be removed stays.

    Every folder below it is moved up to it first, so that no path becomes longer than the longest name.
    """
    mark, top = secrets.token_hex(8), Path(folder)  # the code cannot have used this name
    waiting = [top]
    for place in waiting:  # it grows below
        with suppress(OSError):
            place.chmod(0o700)
            with os.scandir(place) as entries:
                names = list(entries)
            for entry in names:
                with suppress(OSError):
                    if entry.is_dir(follow_symlinks=False):
                        Path(entry).chmod(0o700)  # a folder that is moved must be writable
                        waiting.append(Path(entry).rename(top / f"{mark}.{len(waiting)}"))
                    else:
                        Path(entry).unlink()
    for place in reversed(waiting):
        with suppress(OSError):
            place.rmdir()
