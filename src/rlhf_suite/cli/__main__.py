"""`python -m rlhf_suite.cli ...` is `python run.py ...` and `rlhf-suite ...`; the jobs of a sweep are started so."""

import sys

from rlhf_suite.cli import main
from rlhf_suite.launch.allocator import restart_with_allocator


def command() -> int:
    """Do what the command line says, and return the exit code of this process, which nothing holds afterwards."""
    restart_with_allocator(sys.argv[1:])
    code = main()
    if code:
        from rlhf_suite.launch.stop import leave

        leave(code)
    return code


if __name__ == "__main__":
    raise SystemExit(command())
