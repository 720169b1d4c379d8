"""What a person sees when a run has ended: before and after, the picture of its curve, and where its model is."""

from __future__ import annotations

from pathlib import Path

import pyarrow.parquet as pq

from rlhf_suite.config.runs import LoopRun, TrainedRun
from rlhf_suite.report.curves import draw_curves, series
from rlhf_suite.report.samples import write_samples
from rlhf_suite.train.console import Sample, show_samples
from rlhf_suite.train.run_folder import RunFolder

SAMPLES = 8


def summarise(folder: RunFolder, run: TrainedRun | LoopRun) -> list[str]:
    """Write `curves.png` and, where the run evaluated samples, `samples.md`; show the table; lines that say where."""
    if not folder.metrics.exists():  # a task that trains nothing
        return []
    lines = [f"Curve: {draw_curves(folder)}"]
    samples = before_and_after(folder.evaluations)
    if samples:
        write_samples(folder, samples)
        show_samples(run.logger, samples)
        lines.append(f"Samples: {folder.path / 'samples.md'}")
    return [*accuracy(folder), *lines, f"Model: {run.ckpt.output_dir or folder.model}"]


def accuracy(folder: RunFolder) -> list[str]:
    """The first and the last evaluation of every pass@k."""
    measured = {name: points for name, points in series(folder.metrics).items() if "/pass" in name}
    return [f"{name}: {points[0][1]:.3f} -> {points[-1][1]:.3f}" for name, points in measured.items()]


def before_and_after(evaluations: Path, count: int = SAMPLES) -> list[Sample]:
    """The first sample of the first few prompts in the first and in the last evaluation; prompts that changed first."""
    files = sorted(evaluations.glob("step_*.parquet"))
    if len(files) < 2:
        return []
    before, after = (pq.read_table(file, filters=[("sample", "=", 0)]).to_pylist() for file in (files[0], files[-1]))
    pairs = [
        Sample(b["prompt"], b["response"], a["response"], b["label"], (b["reward"], a["reward"]))
        for b, a in zip(before, after, strict=True)
    ]
    return sorted(pairs, key=lambda pair: pair.before == pair.after)[:count]
