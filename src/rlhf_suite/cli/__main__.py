"""`python -m rlhf_suite.cli ...` is `python run.py ...` and `rlhf-suite ...`."""

import sys
from typing import NoReturn

from rlhf_suite.cli import main
from rlhf_suite.launch.allocator import restart_with_allocator
from rlhf_suite.launch.stop import leave


def command() -> NoReturn:
    """Do what the command line says, and end this process with its exit code."""
    restart_with_allocator(sys.argv[1:])
    leave(main())


if __name__ == "__main__":
    command()
