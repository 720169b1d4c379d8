"""How much of this machine its processes may take: the whole of it, or as much as their container or job may."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path, PurePosixPath

# Where the control groups of Linux are (cgroups(7)), by their controller: that of version 2 has no name, and both
# resources have a controller of their own in version 1.
MEMORY_GROUPS = {"": Path("/sys/fs/cgroup"), "memory": Path("/sys/fs/cgroup/memory")}
CPU_GROUPS = {"": Path("/sys/fs/cgroup"), "cpu": Path("/sys/fs/cgroup/cpu")}


def machine_memory() -> int:
    """Return the bytes of memory that this process and those beside it may take together: those of the machine, or the
    least limit of the control groups that this process is in, which containers and jobs of Slurm have."""
    physical = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return min([physical, *memory_limits(own_groups())])


def cpu_count() -> int:
    """Return the number of CPU cores that this process and those beside it may take together: those that it may run
    on, or the least share of time that its control groups have, in whole cores."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min([cores, *(math.ceil(share) for share in cpu_limits(own_groups()))]))


def own_groups() -> str:
    """Return the control groups of this process, "" where the system has none."""
    try:
        return Path("/proc/self/cgroup").read_text(encoding="utf-8")
    except OSError:
        return ""


def memory_limits(groups: str) -> list[int]:
    """Return the limits of memory in bytes of the control groups that /proc/self/cgroup lists, and of those around
    them."""
    limits = []
    for folder in folders_of(groups, MEMORY_GROUPS):
        for name in ("memory.max", "memory.limit_in_bytes"):  # of version 2, and of version 1
            with suppress(OSError, ValueError):  # no such group, or "max": no limit
                limits.append(int((folder / name).read_text(encoding="utf-8")))
    return limits


def cpu_limits(groups: str) -> list[float]:
    """Return the cores whose time the control groups that /proc/self/cgroup lists, and those around them, may take."""
    shares = []
    for folder in folders_of(groups, CPU_GROUPS):
        for names in (("cpu.max",), ("cpu.cfs_quota_us", "cpu.cfs_period_us")):  # of version 2, and of version 1
            with suppress(OSError, ValueError):  # no such group, or "max": no limit
                quota, period = map(
                    int, " ".join((folder / name).read_text(encoding="utf-8") for name in names).split()
                )
                if quota > 0 and period > 0:  # -1: no limit
                    shares.append(quota / period)
    return shares


def folders_of(groups: str, roots: Mapping[str, Path]) -> Iterator[Path]:
    """Yield the folders of the control groups that /proc/self/cgroup lists, for the controllers of `roots`, and of
    those around them. In a container the groups around its own are not visible, and the root of what is visible is its
    own."""
    for line in groups.splitlines():
        _, controllers, path = line.split(":", 2)
        for controller in {*controllers.split(",")} & roots.keys():
            group = PurePosixPath(path)
            for folder in (group, *group.parents):
                yield roots[controller] / str(folder).lstrip("/")
