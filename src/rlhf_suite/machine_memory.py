"""How much memory the processes of this machine may take: all of it, or as much as their container or job may."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path, PurePosixPath

# The controllers of Linux (cgroups(7)) under which a limit of memory stands, and its file: version 2, then version 1.
LIMITS = {
    "": (Path("/sys/fs/cgroup"), "memory.max"),
    "memory": (Path("/sys/fs/cgroup/memory"), "memory.limit_in_bytes"),
}


def machine_memory() -> int:
    """Return the bytes of memory that this process and those beside it may take together: those of the machine, or the
    least limit of the control groups that this process is in, which containers and jobs of Slurm have."""
    physical = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    try:
        groups = Path("/proc/self/cgroup").read_text(encoding="utf-8")
    except OSError:
        return physical
    return min([physical, *limits_of(groups)])


def limits_of(groups: str) -> list[int]:
    """Return the limits of memory in bytes of the control groups that /proc/self/cgroup lists, and of those around
    them. In a container the groups around its own are not visible, and the root of what is visible is its own."""
    limits = []
    for line in groups.splitlines():
        _, controllers, path = line.split(":", 2)
        for controller in {*controllers.split(",")} & LIMITS.keys():
            root, name = LIMITS[controller]
            group = PurePosixPath(path)
            for folder in (group, *group.parents):
                with suppress(OSError, ValueError):  # no such group, or "max": no limit
                    limits.append(int((root / str(folder).lstrip("/") / name).read_text()))
    return limits
