"""`python -m rlhf_suite.api.child <pid> <words>`: a run that Python started, which ends when process `pid` does."""

from __future__ import annotations

import sys


def command() -> int:
    """Do what the command line says; return the exit code."""
    from rlhf_suite.cli.__main__ import command as run_words
    from rlhf_suite.launch.processes import kill_with_parent

    kill_with_parent(int(sys.argv[1]))
    sys.argv = [sys.argv[0], *sys.argv[2:]]
    return run_words()


if __name__ == "__main__":
    sys.exit(command())
