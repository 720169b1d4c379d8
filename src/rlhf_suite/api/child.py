"""`python -m rlhf_suite.api.child <pid> <words>`: a run that Python started, which ends when process `pid` does."""

from __future__ import annotations

import sys
from typing import NoReturn


def command() -> NoReturn:
    """Do what the command line says, and end this process with its exit code."""
    from rlhf_suite.cli.__main__ import command as run_words
    from rlhf_suite.launch.processes import kill_with_parent

    kill_with_parent(int(sys.argv[1]))
    sys.argv = [sys.argv[0], *sys.argv[2:]]
    run_words()


if __name__ == "__main__":
    command()
