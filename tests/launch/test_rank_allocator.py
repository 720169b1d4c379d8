"""The allocator of processes that train on a CPU."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from rlhf_suite.launch import allocator
from rlhf_suite.launch.allocator import CHOICES_OF_THE_USER, allocator_env, find_jemalloc

pytestmark = pytest.mark.skipif(find_jemalloc() is None, reason="the package of Ray has no jemalloc here")
SOURCES = str(Path(allocator.__file__).parents[2])
STARTED = f"""
import os, sys
from rlhf_suite.launch.allocator import restart_with_allocator
restart_with_allocator(sys.argv[1:])
is_loaded = "libjemalloc" in open("/proc/self/maps").read()
print(os.getpid(), is_loaded, *(name for name in {CHOICES_OF_THE_USER} if name in os.environ))
"""
MEMORY = """
import resource
import torch
def resident():
    return int(open("/proc/self/statm").read().split()[1]) * resource.getpagesize()
def train(layers=60):
    small = []
    for _ in range(layers):
        large = [torch.ones(1_500_000) for _ in range(4)]
        small.append(torch.ones(30_000))
train()
before, faults = resident(), resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(5):
    train()
print(resident() - before, resource.getrusage(resource.RUSAGE_SELF).ru_minflt - faults)
"""

FREED = """
import torch
from pathlib import Path
from rlhf_suite.launch.allocator import PAGE, FreedMemory
def held():
    return int(Path("/proc/self/statm").read_text().split()[1]) * PAGE
freed = FreedMemory()
freed.give_back()
blocks = [torch.ones(2_000_000) for _ in range(60)]
del blocks
before = held()
freed.give_back()
print(before - held())
"""


def start(program: str, *words: str, **environment: str) -> list[str]:
    """Return what a program printed, and the number of its process in front."""
    command = [sys.executable, "-c", program, *words]
    inherited = {name: value for name, value in os.environ.items() if name not in CHOICES_OF_THE_USER}
    process = subprocess.Popen(
        command, env=inherited | {"PYTHONPATH": SOURCES} | environment, stdout=subprocess.PIPE, text=True
    )
    printed, _ = process.communicate()
    assert process.returncode == 0
    return [str(process.pid), *printed.split()]


@pytest.mark.parametrize("words", [("task=sft",), ("--config", "run.yaml")])
def test_a_run_has_it_in_the_same_process_and_passes_nothing_on(words):
    begun, process, is_loaded, *inherited = start(STARTED, *words)
    assert process == begun and is_loaded == "True" and inherited == []


def test_a_command_that_is_not_a_run_is_not_started_again():
    assert start(STARTED, "why", "outputs")[2:] == ["False"]


@pytest.mark.parametrize("name", CHOICES_OF_THE_USER)
def test_a_choice_of_the_user_stays(name):
    value = {"LD_PRELOAD": "", "GLIBC_TUNABLES": "glibc.malloc.perturb=0", "MALLOC_CONF": "abort:false"}.get(
        name, "1048576"
    )
    assert start(STARTED, "task=sft", **{name: value})[2:] == ["False", name]


def test_ranks_on_gpus_keep_the_allocator_of_the_system():
    assert allocator_env("cuda") == {}


def test_freed_tensors_are_used_again_between_small_ones_that_live_on():
    chosen = {"LD_PRELOAD": str(find_jemalloc())} | allocator.SETTINGS
    _, kept, faults = start(MEMORY, **chosen)
    assert int(kept) < 24_000_000 and int(faults) < 10_000
    _, _, faults = start(MEMORY, MALLOC_MMAP_THRESHOLD_="1048576")
    assert int(faults) > 1_000_000, "the measure shows nothing"


@pytest.mark.notices(
    "memory that was freed is never given back",
    "launch/allocator.py",
    "self.library.mallctl(PURGE, None, None, None, 0)",
    "pass",
)
def test_a_process_that_has_grown_gives_back_what_it_has_freed():
    """It frees 480 MB between two steps."""
    _, given = start(FREED, **allocator_env("cpu"))
    assert int(given) > 400e6


def test_a_process_with_another_allocator_leaves_it_alone():
    start(FREED)
