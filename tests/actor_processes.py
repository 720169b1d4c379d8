"""The processes of Ray actors, known by the logs that their output goes to."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

import psutil

from rlhf_suite.launch.actor_log import Member


def process_of(log: Path, processes: Iterable[psutil.Process]) -> psutil.Process:
    """Return which of the processes writes to a log, and not one that it started, whose output goes there too."""
    writers: dict[int, psutil.Process] = {}
    for process in processes:
        with suppress(OSError):
            if Path(f"/proc/{process.pid}/fd/1").readlink() == log.resolve():
                writers[process.pid] = process
    for process in writers.values():
        if process.ppid() not in writers:
            return process
    raise AssertionError(f"nobody writes to {log}")


def kill_actor(member: Member) -> None:
    """Kill the process of an actor that this process started."""
    process_of(member.log, psutil.Process().children(recursive=True)).kill()
