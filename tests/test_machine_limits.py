"""What containers and jobs may take of a machine, by their control groups."""

from __future__ import annotations

import os

import pytest

from rlhf_suite import machine_limits
from rlhf_suite.machine_limits import cpu_count, cpu_limits, machine_memory, memory_limits

pytestmark = pytest.mark.quick
TWO = {"job/memory.max": f"{3 << 30}", "job/step/memory.max": "max", "job/cpu.max": "max 100000"} | {
    "job/step/cpu.max": "150000 100000"
}
ONE = {"job/memory.limit_in_bytes": f"{9 << 30}", "job/step/memory.limit_in_bytes": f"{5 << 30}"} | {
    "job/cpu.cfs_quota_us": "-1",
    "job/cpu.cfs_period_us": "100000",
    "job/step/cpu.cfs_quota_us": "400000",
    "job/step/cpu.cfs_period_us": "100000",
}


@pytest.fixture(autouse=True)
def groups(tmp_path, monkeypatch):
    """Folders of control groups of both versions, with a job of which a step is a part."""
    for version, files in {"two": TWO, "one": ONE}.items():
        for name, text in files.items():
            file = tmp_path / version / name
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(f"{text}\n")
    two, one = tmp_path / "two", tmp_path / "one"
    monkeypatch.setattr(machine_limits, "MEMORY_GROUPS", {"": two, "memory": one})
    monkeypatch.setattr(machine_limits, "CPU_GROUPS", {"": two, "cpu": one})


@pytest.mark.parametrize(
    ("groups_of_process", "memory", "cores"),
    [
        ("0::/job/step\n", [3 << 30], [1.5]),
        ("0::/job\n", [3 << 30], []),
        ("4:memory:/job/step\n3:cpu,cpuacct:/job/step\n0::/\n", [5 << 30, 9 << 30], [4.0]),
        ("3:cpuacct,cpu:/job\n", [], []),
        ("0::/elsewhere\n", [], []),
        ("7:pids:/job/step\n", [], []),
        ("", [], []),
    ],
)
def test_limits_of_containers_and_jobs_are_read(groups_of_process, memory, cores):
    assert memory_limits(groups_of_process) == memory
    assert cpu_limits(groups_of_process) == cores


@pytest.mark.notices(
    "a container with a share of a machine counts all of its cores",
    "machine_limits.py",
    "min([cores, *(math.ceil(share) for share in cpu_limits(own_groups()))])",
    "cores",
)
@pytest.mark.parametrize(("quota", "expected"), [("50000 100000", 1), ("100001 100000", 2), ("max 100000", None)])
def test_cores_are_those_that_the_container_pays_for(quota, expected, tmp_path, monkeypatch):
    monkeypatch.setattr(machine_limits, "own_groups", lambda: "0::/job/step\n")
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: range(64))
    (tmp_path / "two" / "job" / "step" / "cpu.max").write_text(quota)
    assert cpu_count() == (expected or 64)


def test_the_limits_of_this_machine_are_numbers():
    assert 1 << 28 < machine_memory() < 1 << 50
    assert 1 <= cpu_count() <= (os.cpu_count() or 1)
