"""The log file of each actor, which holds all of its output and whose last lines are quoted when the actor fails.

File descriptors 1 and 2 are redirected, so the output of C++ libraries and of a crashing interpreter is kept too.
To watch an actor: `tail -f <run folder>/logs/<name>-<rank>.log`.
"""

from __future__ import annotations

import faulthandler
import os
import socket
import sys
from collections import deque
from dataclasses import dataclass
from pathlib import Path

from rlhf_suite.foreign_files import ANY_SIZE, DamagedFile, open_regular
from rlhf_suite.foreign_text import printable
from rlhf_suite.launch.environment import adopt_umask
from rlhf_suite.waits import record_here

TAIL_LINES = 20
TAIL_BYTES = 64 << 10


@dataclass(frozen=True)
class Member:
    """The name of an actor in error messages, such as `actor-0`, and the file that holds its output."""

    name: str
    log: Path

    def tail(self) -> str:
        """Return the last lines of the log with a heading, or a line that says that the log is empty."""
        lines = tail_lines(self.log)
        if not lines:
            return f"{self.log} is empty"
        return f"the end of {self.log}:\n" + "\n".join(f"    {printable(line, keep_lines=True)}" for line in lines)


def redirect_output(log: Path) -> None:
    """Append the stdout and stderr of this process, including those of C++ libraries, to the file `log`, after a line
    that says where it runs.

    An actor calls this function first. So it also applies the umask of the run.
    """
    from ray.util import get_node_ip_address

    adopt_umask()
    log.parent.mkdir(parents=True, exist_ok=True)
    fd = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    sys.stdout.flush()
    sys.stderr.flush()
    os.dup2(fd, 1)
    os.dup2(fd, 2)
    os.close(fd)
    # The stream objects that Ray made may write to a file of Ray: make new ones on the redirected descriptors.
    sys.stdout = open(1, "w", encoding="utf-8", buffering=1, closefd=False)  # noqa: SIM115
    sys.stderr = open(2, "w", encoding="utf-8", buffering=1, closefd=False)  # noqa: SIM115
    sys.stdout.write(f"{log.stem} is process {os.getpid()} on {socket.gethostname()} ({get_node_ip_address()})\n")
    faulthandler.enable(file=2, all_threads=True)
    record_here(log.with_suffix(".json"))


def tail_lines(path: Path, count: int = TAIL_LINES) -> list[str]:
    """Return the last `count` lines of a text file; an empty list if the file does not exist."""
    if not path.is_file():
        return []
    try:
        with open_regular(path, ANY_SIZE) as file:
            file.seek(max(0, path.stat().st_size - TAIL_BYTES))
            text = file.read(TAIL_BYTES).decode(errors="replace")
    except DamagedFile:  # a link, which a folder from elsewhere may have
        return []
    return list(deque(text.splitlines(), maxlen=count))
