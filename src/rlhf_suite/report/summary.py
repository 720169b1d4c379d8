"""What a person sees when a run has ended: before and after, the picture of its curve, and where its model is."""

from __future__ import annotations

import re
from pathlib import Path

import pyarrow.parquet as pq

from rlhf_suite.config.runs import LoopRun, TrainedRun
from rlhf_suite.report.curves import draw_curves, series
from rlhf_suite.report.samples import write_samples
from rlhf_suite.train.console import Sample, show_samples
from rlhf_suite.train.run_folder import RunFolder

SAMPLES = 8
PASS_AT_K = re.compile(r"/pass\d+$")


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
    """The first and the last evaluation of every pass@k, the last with its standard error where that is known."""
    found = series(folder.metrics)
    lines = []
    for name in (name for name in found if PASS_AT_K.search(name)):
        error = f" (standard error {found[f'{name}_stderr'][-1][1]:.3f})" if f"{name}_stderr" in found else ""
        lines.append(f"{name}: {found[name][0][1]:.3f} -> {found[name][-1][1]:.3f}{error}")
    return lines


def before_and_after(evaluations: Path, count: int = SAMPLES) -> list[Sample]:
    """The first sample of the first few prompts in the first and in the last evaluation; prompts that changed first.
    An evaluation may lack prompts: those whose reward failed (reward.on_error=drop)."""
    files = sorted(evaluations.glob("step_*.parquet"))
    if len(files) < 2:
        return []
    tables = (pq.read_table(file, filters=[("sample", "=", 0)]).to_pylist() for file in (files[0], files[-1]))
    before, after = ({row["prompt_index"]: row for row in rows} for rows in tables)
    pairs = [
        Sample(b["prompt"], b["response"], a["response"], b["label"], (b["reward"], a["reward"]))
        for b, a in ((before[index], after[index]) for index in before if index in after)
    ]
    return sorted(pairs, key=lambda pair: pair.before == pair.after)[:count]
