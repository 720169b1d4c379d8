"""What an earlier run in a folder means for the one started there: finished, to be continued, of other flags."""

from __future__ import annotations

from pathlib import Path

from rlhf_suite.config.generate import output_file
from rlhf_suite.config.problems import Problem
from rlhf_suite.config.resume import changes, load_earlier
from rlhf_suite.config.runs import GenerateRun, LoopRun, ResumableRun, Run, ScoreRun, TrainedRun
from rlhf_suite.tracking.run_folder import RunFolder
from rlhf_suite.train.checkpoint import store_of

METRICS_SHOWN = 6


def finished(run: Run, folder: Path) -> str | None:
    """Return how the run in a folder ended, if it reached its end with these flags and its result is there."""
    record = RunFolder(folder)
    if not isinstance(run, ResumableRun) or not run.ckpt.load_enable or record.status()["state"] != "done":
        return None
    before, result = load_earlier(record.config), result_of(run, record)
    if isinstance(before, Problem) or changes(before, run) or not result.exists():
        return None
    metrics = record.status()["metrics"]
    chosen = [name for name in metrics if name.startswith("eval/")] or list(metrics)
    shown = "".join(f", {name} {metrics[name]:.4g}" for name in chosen[:METRICS_SHOWN] if metrics[name] is not None)
    step = record.status()["last_step"]
    reached = f" after step {step}" if step else ""
    return f"the run in {folder} is finished{reached}{shown}. Its result is {result}; nothing is left to do"


def result_of(run: ResumableRun, record: RunFolder) -> Path:
    """Return where a run puts what it is made for: the model, or the rows."""
    if isinstance(run, GenerateRun):
        return output_file(run.generate.output_path, run.generate.shard, record.path / "generations.jsonl")
    if isinstance(run, ScoreRun):
        return output_file(run.score.output_path, run.score.shard, record.path / "scores.jsonl")
    assert isinstance(run, TrainedRun | LoopRun)
    return Path(record.status().get("outputs", {}).get("actor") or run.ckpt.output_dir or record.model)


def how_to_continue(run: Run, folder: Path) -> str:
    """Return what to tell the user of a run that was stopped: from where it can go on, if from anywhere."""
    if not isinstance(run, ResumableRun):
        return ""
    record, again = RunFolder(folder), "with the same command and ckpt.load_enable=true"
    if not isinstance(run, TrainedRun):
        begun = record.loop if isinstance(run, LoopRun) else record.path / "progress.json"
        return f"; continue where it was {again}" if begun.exists() else "; nothing was saved yet"
    newest = store_of(run.ckpt, record).latest()
    if newest is not None:
        return f"; continue after step {newest.step} {again}"
    never = " (ckpt.save_steps=-1)" if run.ckpt.save_steps == -1 else ""
    return f"; no checkpoint was saved{never}, so it cannot be continued"


def keep_other_config(run: Run, record: RunFolder) -> None:
    """Keep the configuration of an earlier run with other flags as config.1.yaml, config.2.yaml, ..."""
    if not record.config.exists():
        return
    before = load_earlier(record.config)
    if isinstance(before, Problem) or changes(before, run):
        number = sum(1 for _ in record.path.glob("config.*.yaml")) + 1
        record.config.rename(record.path / f"config.{number}.yaml")
