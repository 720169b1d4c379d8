"""Small supervised runs whose reads of flags are recorded: `python recorded_runs.py <folder> <line> ...`.

Each run is forked from this process so that the imports are paid once; `<folder>/<n>.reads` has what the n-th read.
A line that is given again goes on in the folder of the first.
"""

from __future__ import annotations

import importlib
import os
import sys
import traceback
from pathlib import Path

import sitecustomize

from rlhf_suite.composition.arguments import parse
from rlhf_suite.preflight.jobs import preflight
from rlhf_suite.run_folders.run_folder import RunFolder
from small_runs import run_task


def recorded(line: str, folder: Path, reads: Path) -> int:
    """The process id of the run."""
    (config,) = preflight(parse(line.split())).runs
    importlib.import_module(f"rlhf_suite.tasks.{config.task}")
    if pid := os.fork():
        return pid
    try:
        sitecustomize.seen.clear()
        os.environ[sitecustomize.FILE] = str(reads)
        RunFolder(folder).start("recorded")
        run_task(config, folder)
        os._exit(0)
    except BaseException:
        traceback.print_exc()
        os._exit(1)


if __name__ == "__main__":
    root, lines = Path(sys.argv[1]), sys.argv[2:]
    for number, line in enumerate(lines):
        pid = recorded(line, root / str(lines.index(line)), root / f"{number}.reads")
        assert os.waitpid(pid, 0)[1] == 0, line
