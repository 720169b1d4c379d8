"""A stage of a loop: the run whose configuration the loop has written, as a process that ends with the loop.

`python -m rlhf_suite.cli.stage <folder> <pid of the loop>`. Its end is in the folder's status.json and error.log, and
the loop tells it.
"""

from __future__ import annotations

import sys
from pathlib import Path

from rlhf_suite.cli.execute import execute
from rlhf_suite.config.resolve import load
from rlhf_suite.launch.processes import kill_with_parent


def main(folder: Path, parent: int) -> int:
    """Run the stage; returns the exit code."""
    kill_with_parent(parent)
    return execute(load(folder / "config.yaml"), folder, lambda message, code: code)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), int(sys.argv[2])))
