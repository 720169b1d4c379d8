"""What a rank does with the memory of its process."""

from __future__ import annotations

import os
import platform
import subprocess
import sys

import pytest

PROGRAM = """
import sys
from pathlib import Path
import torch
from rlhf_suite.distributed.world import give_back_freed_memory

def resident():
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096

if sys.argv[1] == "given back":
    give_back_freed_memory()
torch.ones(6_000_000)  # freed at once: from now on glibc keeps tensors below 24 MB, unless it is told not to
small = [torch.ones(1000) for _ in range(5000)]  # in all gaps of the heap, whose number differs with its addresses
before = resident()
large = []
for _ in range(50):
    large.append(torch.ones(1_000_000))
    small.append(torch.ones(1000))
(heap,) = (line.split()[0] for line in open("/proc/self/maps") if line.endswith("[heap]\\n"))
begin, end = (int(each, 16) for each in heap.split("-"))
is_in_heap = begin <= large[-1].data_ptr() < end
large.clear()
print(resident() - before, int(is_in_heap))
"""
FREED = 50 * 4_000_000


def kept(*arguments, **environment):
    """Return the bytes that a process keeps of FREED bytes of tensors, between which small ones live on, and whether
    these tensors were among the small ones (1 or 0)."""
    command = [sys.executable, "-c", PROGRAM, *arguments]
    done = subprocess.run(command, env=os.environ | environment, capture_output=True, text=True, check=True)
    return [int(each) for each in done.stdout.split()]


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc keeps what is freed")
def test_a_rank_on_a_cpu_gives_back_the_memory_of_freed_tensors():
    bytes_kept, is_in_heap = kept("as it is")
    assert bytes_kept > 0.9 * FREED and is_in_heap
    bytes_kept, is_in_heap = kept("given back")
    assert bytes_kept < 0.1 * FREED and not is_in_heap
    _, is_in_heap = kept("given back", MALLOC_MMAP_THRESHOLD_="33554432")
    assert is_in_heap, "the limit of the user was overwritten"
