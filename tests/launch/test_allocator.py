"""A process that keeps the memory that it frees."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from rlhf_suite.launch import processes

PROGRAM = """
import resource
import numpy as np
from rlhf_suite.launch.processes import keep_freed_memory
{}
np.ones(1 << 24)
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(4):
    np.ones(1 << 24)
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def page_faults(call: str) -> int:
    """Of four arrays of 128 MiB each, one after the other, without huge pages."""
    command = [sys.executable, "-c", PROGRAM.format(call)]
    sources = str(Path(processes.__file__).parents[2])
    env = {"NUMPY_MADVISE_HUGEPAGE": "0", "PATH": "/usr/bin:/bin", "PYTHONPATH": sources}
    return int(subprocess.run(command, env=env, capture_output=True, text=True, check=True).stdout)


@pytest.mark.skipif(sys.platform != "linux", reason="the allocator is that of glibc")
def test_the_next_array_gets_the_pages_of_the_last_one():
    assert page_faults("") > 100_000
    assert page_faults("keep_freed_memory()") < 1_000
