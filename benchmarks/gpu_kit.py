"""What a GPU makes of the suite, in one command: `python3 noxfile.py -s gpu`, or `python benchmarks/gpu_kit.py`.

It runs every test marked `gpu`, then the rows of gpu_rows.py: tokens per second, model-FLOP utilisation and memory of
trainer steps on one device. It writes results/gpu.jsonl, one line per row, and docs/gpu.md. It needs no network, and
neither Ray, DeepSpeed nor vLLM: PyTorch with CUDA, transformers and the packages that `--carry` names are enough.
Without a GPU it is a dry run: the same code with tiny shapes on the CPU, which writes only into `--out`.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from importlib.metadata import PackageNotFoundError, distribution, requires, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "src"), str(ROOT / "benchmarks")]  # a bare machine has no installed suite

import older_torch  # noqa: E402 - it is found by the line above

THERE = ("torch", "transformers")  # what the machine has, with all that they need
CARRIED = ("omegaconf", "rich", "peft", "accelerate", "pytest", "pytest-timeout")
VERSIONS = ("torch", "transformers", "triton", "liger-kernel", "flash-linear-attention", "flash-attn", "flash-attn-4")
MARK = "pytest.mark.gpu"
ATTENTION = {  # where attention comes from, in words
    "torch": "torch",
    "flash_attn": "FlashAttention 2",
    "flash_attn_interface": "FlashAttention 3",
    "flash_attn.cute": "FlashAttention 4",
}
Line = dict[str, Any]

HEAD = """# On a GPU

This page has the results of the GPU tests, and the speed and memory of trainer steps on one GPU. To measure your own:

```bash
python3 noxfile.py -s gpu
```

The command runs every test marked `gpu`, and then measures the rows below on one device. It writes this page and
`benchmarks/results/gpu.jsonl`. It uses no network: the models are random weights in the shapes of Qwen3, and the
command creates the tokenizer. Without a GPU the same code makes a dry run with tiny shapes on the CPU, which changes
neither this page nor the results. [fake_gpu.md](fake_gpu.md) describes how the code for GPUs is tested without a GPU.

## A bare machine

A bare machine needs PyTorch with CUDA, transformers and a few more packages. It needs neither Ray, DeepSpeed nor vLLM,
because the rows train with `ds.zero_stage=null`. Run the first two commands on a machine where the suite is installed:

```bash
python benchmarks/gpu_kit.py --carry > carry.txt  # names and versions, and which are not pure Python
pip wheel --no-deps -w carried -r carry.txt
```

Run the others on the bare machine, with the repository and the folder `carried`:

```bash
pip install --no-index --no-deps --target site carried/*.whl
PYTHONPATH=site python benchmarks/gpu_kit.py --out results
```

`--rows rl-0.6b` measures only rows with these words in their names. `--variants plain` measures only these kernels
(`liger`: those of `ds.use_liger_kernel`). `--set FLAG=VALUE` sets flags for all rows. `--no-tests` skips the tests.

## What the table shows

- **Rows.** All rows run in one process on one device: bf16 weights with fp32 masters, packing, gradient checkpointing,
  log-probs without a matrix of all logits, and random tokens. A step has one sequence (DPO: one pair) in one
  micro-batch, unless the name of the row differs: `16-of-1k` packs 16 sequences of 1024 tokens, and `alone` gives each
  sequence its own micro-batch.
- **MFU** counts the operations of the model once, even if checkpointing repeats them. `planner/devices.py` has the
  formula and the peaks of GPUs.
- **Memory** is the largest amount that PyTorch had allocated, and the largest that it had reserved.
- **"Busy"** is the share of a step in which the device computes. It is measured in one more step, under the profiler.
  The lines of gpu.jsonl also name the longest kernels.
- **Published values** come from prime-rl on one H100 in January 2026, with FlashAttention 3: tokens per second of a
  step by its own clock, and reserved memory. The goal is 1.5 times each speed, with no more memory.
- **Attention.** The fastest installed package that agrees with torch's kernel computes attention, and otherwise
  torch's kernel (FlashAttention 2). FlashAttention 4 comes from `pip install flash-attn-4`, and compiles each shape in
  6 to 10 s. On a Hopper GPU, version 4.0.0b36 was right for heads of 32, 64, 96, 128, 192 and 256. It returned wrong
  gradients, without an error, for heads of 16, 40, 48, 72, 80 and 112. For these sizes the suite uses torch's kernel,
  with a warning.

The failed tests in the list below have two causes. Liger's kernels of an earlier test stayed in the process, so later
tests used them on the CPU. This is repaired, but was not run again. DeepSpeed 0.19.8 cannot read
TORCH_CUDA_ARCH_LIST=9.0a, which that machine had set.

"""


def main() -> None:
    """Run tests and rows, and write the lines and the page."""
    chosen = arguments()
    if chosen.carry:
        print("\n".join(carry_list()))
        return
    import torch

    device = "cuda" if torch.cuda.is_available() and not chosen.dry_run else "cpu"
    is_dry = device == "cpu"
    older_torch.take_grouped_queries()
    results, page = chosen.out or ROOT / "benchmarks" / "results", chosen.out or ROOT / "docs"
    known = saved_lines(results / "gpu.jsonl") if chosen.add else []
    lines: list[Line] = []
    for line in measured(chosen, device):
        lines.append(setting(device, is_dry) | line)
        print(json.dumps(lines[-1]), flush=True)
        if not is_dry or chosen.out:  # written as they come: what is stopped has what was measured
            results.mkdir(parents=True, exist_ok=True)
            (results / "gpu.jsonl").write_text("".join(json.dumps(line) + "\n" for line in known + lines))
            (page / "gpu.md").write_text(page_of(known + lines))
    if any("error" in line or line.get("failed") for line in lines):
        sys.exit(1)


def saved_lines(path: Path) -> list[Line]:
    """Return the lines of a file; none if there is no file."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()] if path.exists() else []


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dry-run", action="store_true", help="tiny shapes on the CPU, also where there is a GPU")
    parser.add_argument("--out", type=Path, help="the folder for gpu.jsonl and gpu.md")
    parser.add_argument("--rows", nargs="*", default=[""], help="words in the names of the rows to measure")
    parser.add_argument("--variants", nargs="*", help="the kernels to measure rows with; all that are installed")
    parser.add_argument("--steps", type=int, default=5, help="optimiser steps of a row that count; a dry run takes one")
    parser.add_argument("--add", action="store_true", help="keep the lines that were measured before")
    parser.add_argument("--no-tests", action="store_true", help="measure rows alone")
    parser.add_argument("--carry", action="store_true", help="print the packages that a bare machine needs, and end")
    parser.add_argument("--set", nargs="*", default=[], metavar="FLAG=VALUE", help="further flags of every row")
    return parser.parse_args()


def measured(chosen: argparse.Namespace, device: str) -> Iterator[Line]:
    """Yield a line for the tests, and one for each row."""
    if not chosen.no_tests:
        yield {"row": "tests"} | gpu_tests()
    from gpu_rows import ROWS, VARIANTS, Bench, measure
    from rlhf_suite.config.declarations.flag_types import literal

    is_dry = device == "cpu"
    possible = ["plain"] if is_dry or find_spec("liger_kernel") is None else [*VARIANTS]
    pairs = (each.partition("=") for each in chosen.set)
    flags = {name: literal(value) for name, _, value in pairs}
    with tempfile.TemporaryDirectory(prefix="rlhf-suite-gpu-") as folder:
        bench = Bench(device, Path(folder), 1 if is_dry else chosen.steps, is_dry, flags)
        for variant in chosen.variants or possible:  # the plain rows first: Liger's kernels stay in this process
            for row in ROWS:
                if any(word in row.name for word in chosen.rows):
                    yield measure(row, variant, bench)


def without_folder(words: list[str]) -> list[str]:
    """Return a command line without `--out` and the folder after it: what is measured does not depend on it."""
    place = words.index("--out") if "--out" in words else len(words)
    return words[:place] + words[place + 2 :]


def setting(device: str, is_dry: bool) -> Line:
    """Return what every line says of where and how it came about."""
    import torch

    versions = {}
    for name in VERSIONS:
        try:
            versions[name] = version(name)
        except PackageNotFoundError:
            continue
    return {
        "date": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "command": " ".join(["python", "benchmarks/gpu_kit.py", *without_folder(sys.argv[1:])]),
        "device": torch.cuda.get_device_name() if device == "cuda" else "cpu",
        "dry_run": is_dry,
        "cuda": torch.version.cuda,
        "versions": versions,
    }


# The tests.


def gpu_tests() -> Line:
    """Run every test marked `gpu`; return the names of those that passed, and of the others with the reason."""
    # Whole runs need what a bare machine lacks.
    places = [file for file in (ROOT / "tests").rglob("test_*.py") if "e2e" not in file.parts or find_spec("ray")]
    files = [str(file) for file in sorted(places) if MARK in file.read_text()]
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        command = [sys.executable, "-m", "pytest", "-m", "gpu", "-p", older_torch.__name__]
        command += ["--continue-on-collection-errors", "--junitxml"]
        here = [str(ROOT / "src"), str(ROOT / "benchmarks"), os.environ.get("PYTHONPATH")]
        paths = os.pathsep.join(filter(None, here))
        done = subprocess.run(
            [*command, str(report), *files],
            cwd=ROOT,
            env=os.environ | {"PYTHONPATH": paths},
            capture_output=True,
            text=True,
            check=False,
        )
        if not report.exists():
            return {"error": f"pytest: {(done.stderr or done.stdout).strip().splitlines()[-1]}"}
        return outcomes(ElementTree.parse(report).iter("testcase"))


def outcomes(cases: Iterable[ElementTree.Element]) -> Line:
    """Return the tests of a report by what became of them. A file that imports what is not installed is skipped."""
    passed: list[str] = []
    skipped: dict[str, str] = {}
    failed: dict[str, str] = {}
    for case in cases:
        name = "::".join(filter(None, [case.get("classname"), case.get("name")]))
        problem = next(iter(case), None)
        if problem is None:
            passed.append(name)
            continue
        missing = missing_module(problem.text or "")
        if problem.tag == "skipped":
            skipped[name] = problem.get("message", "")
        elif missing is not None:
            skipped[name] = f"{missing} is not installed"
        else:
            failed[name] = (problem.get("message") or problem.text or "").strip().splitlines()[0]
    return {"passed": passed, "failed": failed, "skipped": skipped}


def missing_module(text: str) -> str | None:
    """Return the module whose absence ended an import, from the text of the error."""
    _, found, rest = text.partition("ModuleNotFoundError: No module named '")
    return rest.partition("'")[0] if found else None


# What to carry.


def carry_list() -> list[str]:
    """Return a requirements file: CARRIED and what they need, without what torch and transformers bring."""
    lines = []
    for name in sorted(needed(CARRIED) - needed(THERE)):
        pure = "Root-Is-Purelib: true" in (distribution(name).read_text("WHEEL") or "")
        lines.append(f"{name}=={version(name)}" + ("" if pure else "  # compiled: the wheel for that machine's Python"))
    return lines


def needed(names: Iterable[str]) -> set[str]:
    """Return these packages and all that they need here, by their normalised names."""
    from packaging.requirements import Requirement
    from packaging.utils import canonicalize_name

    found: set[str] = set()
    left = [canonicalize_name(name) for name in names]
    while left:
        name = left.pop()
        if name in found:
            continue
        found.add(name)
        needs = map(Requirement, requires(name) or [])
        left += [canonicalize_name(need.name) for need in needs if need.marker is None or need.marker.evaluate()]
    return found


# The page.


def page_of(lines: list[Line]) -> str:
    """Return docs/gpu.md."""
    if not lines:
        return HEAD + "No GPU has run it yet.\n"
    rows = [line for line in lines if line["row"] != "tests"]
    tests = [line for line in lines if line["row"] == "tests"]
    versions = {name: number for line in lines for name, number in line["versions"].items()}
    found = f"{lines[0]['device']}, " + ", ".join(f"{name} {number}" for name, number in versions.items())
    return (
        HEAD
        + "\n\n".join(
            [f"## {found}" + (" (dry run)" if lines[0]["dry_run"] else ""), table(rows), *map(of_tests, tests)]
        )
        + "\n"
    )


def table(rows: list[Line]) -> str:
    """Return the rows as a table."""
    columns = ["row", "kernels", "attention", "tokens/s", "seconds", "busy", "MFU", "allocated, reserved GiB"]
    columns += ["published tokens/s, GiB", "ratio"]
    head = f"| {' | '.join(columns)} |\n{'|---' * len(columns)}|"
    return "\n".join([head, *map(of_row, rows)])


def of_row(line: Line) -> str:
    if "error" in line:
        return f"| {line['row']} | {line['variant']} | {line['error']} | | | | | | | |"
    rate, published = line["tokens_per_s"], line["published_tokens_per_s"]
    others = ", ".join(str(each) for each in (published, line["published_memory_gib"]) if each is not None)
    ratio = f"{rate / published:.2f}" if published and not line["dry_run"] else ""
    mfu = "" if line["mfu"] is None else f"{100 * line['mfu']:.1f} %"
    profile, reserved = line["profile"], line["reserved_memory_gib"]
    busy = "" if profile is None else f"{100 * profile['busy_share']:.0f} %"
    memory = ", ".join(f"{gib:.1f}" for gib in (line["peak_memory_gib"], reserved) if gib is not None)
    attention = ATTENTION.get(line.get("attention") or "torch", "")
    first = f"| {line['row']} | {line['variant']} | {attention} | {rate:,.0f} | {line['seconds_per_step']:.3f} "
    return first + f"| {busy} | {mfu} | {memory} | {others} | {ratio} |"


def of_tests(line: Line) -> str:
    """Return what became of the tests."""
    if "error" in line:
        return f"Tests: {line['error']}."
    told = [f"Tests marked `gpu`, on one {line['device']} on {line['date'][:10]}: {len(line['passed'])} passed."]
    for kind in ("failed", "skipped"):
        told += [f"- {kind}: `{name}` ({reason})" for name, reason in line[kind].items()]
    return "\n".join(told)


if __name__ == "__main__":
    main()
