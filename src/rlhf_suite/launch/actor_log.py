"""Where an actor's output goes: one file per actor, whose tail is quoted when the actor fails.

File descriptors 1 and 2 are redirected, so the output of C++ libraries and of a crashing interpreter is kept too.
To watch an actor: `tail -f <run folder>/logs/<name>-<rank>.log`.
"""

from __future__ import annotations

import faulthandler
import os
import sys
from collections import deque
from dataclasses import dataclass
from pathlib import Path

from rlhf_suite.foreign_text import printable
from rlhf_suite.launch.environment import adopt_umask

TAIL_LINES = 20
TAIL_BYTES = 64 << 10


@dataclass(frozen=True)
class Member:
    """An actor as errors name it: `actor-0`, and the file that holds its output."""

    name: str
    log: Path

    def tail(self) -> str:
        """The last lines of the log, with a heading; says so when there are none."""
        lines = tail_lines(self.log)
        if not lines:
            return f"{self.log} is empty"
        return f"the end of {self.log}:\n" + "\n".join(f"    {printable(line, keep_lines=True)}" for line in lines)


def redirect_output(log: Path) -> None:
    """Send this process's stdout and stderr, Python's and the libraries', to `log` (appended).

    An actor calls it first of all, so it also takes over the run's umask here.
    """
    adopt_umask()
    log.parent.mkdir(parents=True, exist_ok=True)
    fd = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    sys.stdout.flush()
    sys.stderr.flush()
    os.dup2(fd, 1)
    os.dup2(fd, 2)
    os.close(fd)
    # Ray's own stream objects may point at a file of Ray's: give Python fresh ones on the redirected descriptors.
    sys.stdout = open(1, "w", buffering=1, closefd=False)  # noqa: SIM115
    sys.stderr = open(2, "w", buffering=1, closefd=False)  # noqa: SIM115
    faulthandler.enable(file=2, all_threads=True)


def tail_lines(path: Path, count: int = TAIL_LINES) -> list[str]:
    """The last `count` lines of a text file; none when the file is not there."""
    if not path.is_file():
        return []
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - TAIL_BYTES))
        text = file.read().decode(errors="replace")
    return list(deque(text.splitlines(), maxlen=count))
