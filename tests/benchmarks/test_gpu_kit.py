"""The GPU kit's dry run on a machine that has torch, transformers and what the kit says to carry, and nothing else."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.metadata import packages_distributions
from pathlib import Path
from xml.etree import ElementTree

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "benchmarks"))

import gpu_kit  # noqa: E402 - it is found by the line above
from rlhf_suite.planner import devices  # noqa: E402

HIDE = """
import sys
from importlib.machinery import PathFinder

HIDDEN = {hidden!r}


class Bare(PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        return None if name.partition(".")[0] in HIDDEN else PathFinder.find_spec(name, path, target)


sys.meta_path[:] = [Bare if finder is PathFinder else finder for finder in sys.meta_path]
"""


def absent_modules() -> set[str]:
    """What can be imported here, and not on a machine with THERE and CARRIED alone."""
    from packaging.utils import canonicalize_name

    allowed = gpu_kit.needed([*gpu_kit.THERE, *gpu_kit.CARRIED])
    owners = {module: {canonicalize_name(name) for name in names} for module, names in packages_distributions().items()}
    return {module for module, names in owners.items() if not names & allowed} - {"rlhf_suite"}


@pytest.fixture(scope="module")
def dry_run(tmp_path_factory):
    """The lines that a dry run prints, and the folder that it writes to."""
    out, bare = tmp_path_factory.mktemp("out"), tmp_path_factory.mktemp("bare")
    absent = absent_modules()
    assert {"deepspeed", "ray", "vllm", "hydra", "datasets", "pyarrow"} <= absent
    (bare / "sitecustomize.py").write_text(HIDE.format(hidden=absent))
    command = [sys.executable, str(ROOT / "benchmarks" / "gpu_kit.py"), "--dry-run", "--out", str(out)]
    env = os.environ | {"PYTHONPATH": str(bare), "CUDA_VISIBLE_DEVICES": ""}
    env |= {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}  # a plugin that is hidden still announces itself
    done = subprocess.run(command, capture_output=True, text=True, env=env, cwd=out, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()], out


@pytest.mark.stack
def test_sft_dpo_and_rl_steps_run_without_ray_deepspeed_and_vllm(dry_run):
    lines, _ = dry_run
    rows = [line for line in lines if line["row"] != "tests"]
    assert {row["task"] for row in rows} == {"sft", "dpo", "rl"}
    assert all(row["tokens_per_s"] > 0 and row["dry_run"] and row["shape"] == "tiny" for row in rows)
    assert {row["mfu"] for row in rows} == {None}, "the peak of a CPU is not known"
    full, lora = (next(row for row in rows if row["row"] == name) for name in ("rl-0.6b-16k", "rl-4b-lora-16k"))
    assert full["flops_per_token"] == 6 * MATRICES + 12 * ATTENTION * 64.5
    adapters = lora["parameters"] - full["parameters"]
    assert lora["flops_per_token"] == 4 * MATRICES + 6 * adapters + 12 * ATTENTION * 64.5


# The tiny shape: vocabulary 320, hidden 64, two layers of 4 heads and 2 key/value heads of 32, gated layers of 128.
MATRICES = 320 * 64 + 2 * (2 * 64 * 128 + 2 * 64 * 64 + 3 * 64 * 128)
ATTENTION = 2 * 4 * 32


@pytest.mark.stack
def test_the_dry_run_says_which_tests_were_skipped_and_why(dry_run):
    (tests,) = (line for line in dry_run[0] if line["row"] == "tests")
    assert (tests["passed"], tests["failed"]) == ([], {})
    kernels = [reason for name, reason in tests["skipped"].items() if "test_the_cuda_kernel_agrees_with_sdpa" in name]
    assert kernels == ["needs a CUDA device"] * 2


@pytest.mark.stack
def test_the_dry_run_writes_its_lines_and_a_page(dry_run):
    lines, out = dry_run
    assert [json.loads(line) for line in (out / "gpu.jsonl").read_text().splitlines()] == lines
    assert (out / "gpu.md").read_text() == gpu_kit.page_of(lines)


def test_the_page_of_the_documentation_is_that_of_the_saved_lines():
    saved = ROOT / "benchmarks" / "results" / "gpu.jsonl"
    lines = [json.loads(line) for line in saved.read_text().splitlines()] if saved.exists() else []
    assert (ROOT / "docs" / "gpu.md").read_text() == gpu_kit.page_of(lines)


LINE = {
    "row": "rl-0.6b-16k",
    "variant": "liger",
    "device": "NVIDIA H100 80GB HBM3",
    "versions": {"torch": "2.13.0"},
    "dry_run": False,
    "tokens_per_s": 23_792.0,
    "mfu": 0.4567,
    "seconds_per_step": 0.6886,
    "peak_memory_gib": 12.04,
    "reserved_memory_gib": 12.31,
    "profile": {"busy_share": 0.987},
    "published_tokens_per_s": 11_896,
    "published_memory_gib": 12.5,
}


def test_the_page_compares_with_what_was_published():
    tests = {
        **LINE,
        "row": "tests",
        "date": "2026-11-28T05:56:37+0000",
        "passed": ["a"],
        "failed": {"b": "1 != 2"},
        "skipped": {"c": "ray is missing"},
    }
    page = gpu_kit.page_of([tests, LINE, {**LINE, "row": "other", "error": "OutOfMemoryError: 80 GB"}])
    assert "## NVIDIA H100 80GB HBM3, torch 2.13.0\n" in page
    assert "| rl-0.6b-16k | liger | torch | 23,792 | 0.689 | 99 % | 45.7 % | 12.0, 12.3 | 11896, 12.5 | 2.00 |" in page
    assert "| other | liger | OutOfMemoryError: 80 GB |" in page
    assert "1 passed.\n- failed: `b` (1 != 2)\n- skipped: `c` (ray is missing)" in page


REPORT = """<testsuites><testsuite>
<testcase classname="m" name="fine"/>
<testcase classname="m" name="alone"><skipped message="needs a CUDA device">m.py:3</skipped></testcase>
<testcase classname="" name="other"><error message="collection failure">ImportError while importing
E   ModuleNotFoundError: No module named 'ray'</error></testcase>
<testcase classname="m" name="wrong"><failure message="assert 1 == 2&#10;more">trace</failure></testcase>
</testsuite></testsuites>"""


def test_a_report_of_tests_is_sorted_by_outcome():
    assert gpu_kit.outcomes(ElementTree.fromstring(REPORT).iter("testcase")) == {
        "passed": ["m::fine"],
        "failed": {"m::wrong": "assert 1 == 2"},
        "skipped": {"m::alone": "needs a CUDA device", "other": "ray is not installed"},
    }


def test_the_operations_of_a_token_by_hand():
    """100 weights, 8 = heads x size; the tokens of a sequence of 3 attend to 2 on average."""
    full, adapted = devices.Model(100, 0, 8), devices.Model(10, 100, 8)
    assert devices.flops_per_token(full, 3) == 6 * 100 + 3 * 4 * 8 * 2
    assert devices.flops_per_token(adapted, 3) == 6 * 10 + 4 * 100 + 3 * 4 * 8 * 2
    assert devices.flops_per_token(full, 3, full) == devices.flops_per_token(full, 3) + 2 * 100 + 4 * 8 * 2


@pytest.mark.parametrize(
    ("device", "peak"),
    [("NVIDIA H100 80GB HBM3", 989.4e12), ("NVIDIA H100 PCIe", 756e12), ("NVIDIA A100-SXM4-80GB", 312e12), ("x", None)],
)
def test_the_peak_of_a_device_is_found_by_its_name(device, peak):
    assert devices.peak_flops(device) == peak


def test_what_to_carry_is_what_torch_and_transformers_do_not_bring():
    names = {line.partition("==")[0] for line in gpu_kit.carry_list()}
    assert {"omegaconf", "antlr4-python3-runtime", "peft", "accelerate", "pytest"} <= names
    assert names.isdisjoint({"torch", "numpy", "transformers", "tokenizers", "deepspeed", "ray", "vllm"})
