"""The memory allocator of processes that train on a CPU: jemalloc, which the package of Ray brings.

glibc either gives each large tensor back to the kernel, which clears all pages of the next one, or keeps the memory of
freed tensors between those that live on. jemalloc keeps it, but small tensors do not lie between large ones
(docs/performance.md has the figures). An allocator is chosen before a process starts, by its environment.

What jemalloc keeps can still be in pieces into which no later tensor fits: under ZeRO-3, whose tensors have many sizes,
it grew by 20 to 45 MB in each step. So a rank gives all of it back when it has grown by a part (`FreedMemory`). To give
it back after some time instead, as jemalloc does by default, takes a fifth of a step's speed.
"""

from __future__ import annotations

import ctypes
import importlib.util
import os
import platform
import sys
from collections.abc import Sequence
from pathlib import Path

PRELOAD = "LD_PRELOAD"
# Freed memory stays in the process, that of blocks of any size.
SETTINGS = {"MALLOC_CONF": "dirty_decay_ms:-1,oversize_threshold:0"}
PAGE, LEAST_GROWTH, GROWTH = os.sysconf("SC_PAGE_SIZE"), 256 * 2**20, 1.3  # bytes, bytes, ratio
PURGE = b"arena.4096.purge"  # of all arenas, in jemalloc's words
CHOICES_OF_THE_USER = (PRELOAD, *SETTINGS, "MALLOC_MMAP_THRESHOLD_", "MALLOC_ARENA_MAX", "GLIBC_TUNABLES")


def allocator_env(device: str) -> dict[str, str]:
    """Return the environment variables with which a rank on `device` starts, beside those of `runtime_env`.

    They are none on GPUs, where another library than Ray's would be needed, and where the user has set one of
    `CHOICES_OF_THE_USER`.
    """
    library = find_jemalloc() if device == "cpu" else None
    if library is None or any(name in os.environ for name in CHOICES_OF_THE_USER):
        return {}
    return {PRELOAD: str(library)} | SETTINGS


def find_jemalloc() -> Path | None:
    """Return the library in Ray's package, found without an import of Ray; None where it is not."""
    if sys.platform != "linux" or platform.machine() != "x86_64":  # others may have larger pages than it was built for
        return None
    package = importlib.util.find_spec("ray")
    folders = package.submodule_search_locations or () if package is not None else ()
    libraries = (Path(folder) / "core" / "libjemalloc.so" for folder in folders)
    return next((library for library in libraries if library.is_file()), None)


class FreedMemory:
    """What a process has freed and its allocator keeps, given back to the kernel where it grows."""

    def __init__(self) -> None:
        path = find_jemalloc()
        is_used = path is not None and str(path) in Path("/proc/self/maps").read_text(encoding="utf-8")
        self.library = ctypes.CDLL(str(path)) if is_used else None
        self.before: int | None = None  # bytes that the process held after the first step since they were given back

    def give_back(self) -> None:
        """Give it back, if the process has grown by GROWTH since the last time; called after a step."""
        if self.library is None:
            return
        held = int(Path("/proc/self/statm").read_text(encoding="utf-8").split()[1]) * PAGE
        if self.before is None:
            self.before = held
        elif held > max(GROWTH * self.before, self.before + LEAST_GROWTH):
            self.library.mallctl(PURGE, None, None, None, 0)
            self.before = None


def restart_with_allocator(words: Sequence[str]) -> None:
    """Start this process again, with the allocator of a rank, if its words are those of a run; then return.

    The process is the same for everyone who waits for it. What it starts does not inherit the allocator.
    """
    if os.environ.get(PRELOAD) == str(find_jemalloc()):
        for name in (PRELOAD, *SETTINGS):
            os.environ.pop(name, None)
        return
    is_run = any("=" in word for word in words) or "--config" in words
    if is_run and not has_gpu() and (chosen := allocator_env("cpu")):
        os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], os.environ | chosen)


def has_gpu() -> bool:
    """Return whether this machine has a GPU of NVIDIA, as far as its device files say."""
    return any(Path("/dev").glob("nvidia[0-9]*"))
