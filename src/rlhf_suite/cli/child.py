"""`python -m rlhf_suite.cli.child <pid> <words>`: a command line as a process that ends when process `pid` does.

Runs that Python starts, and the jobs of a sweep, are such processes.
"""

from __future__ import annotations

import sys
from typing import NoReturn

from rlhf_suite.cli.__main__ import command as run_words
from rlhf_suite.launch.processes import kill_with_parent


def command() -> NoReturn:
    """Do what the command line says, and end this process with its exit code."""
    kill_with_parent(int(sys.argv[1]))
    sys.argv = [sys.argv[0], *sys.argv[2:]]
    run_words()


if __name__ == "__main__":
    command()
