"""The loop of every supervised task: optimise, log, evaluate, save; resume as if nothing had happened."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlhf_suite.config.runs import SFTRun
from rlhf_suite.data.batch import Example
from rlhf_suite.train.checkpoint import CheckpointStore
from rlhf_suite.train.console import Progress
from rlhf_suite.train.evaluate import evaluate
from rlhf_suite.train.loader import StepLoader
from rlhf_suite.train.metrics import MetricLogger
from rlhf_suite.train.run_folder import RunFolder
from rlhf_suite.train.step import optimizer_step
from rlhf_suite.train.strategy import TrainedModel
from rlhf_suite.train.task import Task


@dataclass
class Trainer:
    """One rank of a supervised run. Rank 0 logs and commits checkpoints; every rank computes."""

    config: SFTRun
    task: Task
    model: TrainedModel
    loader: StepLoader
    eval_sets: Mapping[str, Sequence[Example]]
    folder: RunFolder
    save_hf: Any  # callable(path): every rank calls it, rank 0 writes

    def __post_init__(self) -> None:
        path = Path(self.config.ckpt.path) if self.config.ckpt.path else self.folder.checkpoints
        self.world = self.model.world
        self.store = CheckpointStore(self.config.ckpt, path)
        self.best: float | None = None
        self.last: dict[str, float] = {}

    def fit(self) -> dict[str, float]:
        """Train to the end and return the last metrics."""
        start = self.resume()
        self.logger = MetricLogger(self.config.logger, self.folder, start) if self.world.is_main else None
        self.progress = Progress(self.config.logger, self.config.task, self.loader.total_steps, start, self.world.is_main)
        for step in range(start, self.loader.total_steps):
            self.train_step(step)
            if self.is_due(step, self.eval_every()):
                self.evaluate(step + 1)
            if self.config.ckpt.save_steps > 0 and (step + 1) % self.config.ckpt.save_steps == 0:
                self.save(step + 1)
        self.close()
        return self.last

    def train_step(self, step: int) -> None:
        """One optimiser step (0-based) and its log line (1-based)."""
        began = time.perf_counter()
        batches = self.loader.step(step)
        metrics = optimizer_step(self.model, self.task, batches, step, self.config.train.on_nonfinite)
        seconds = time.perf_counter() - began
        named = {f"train/{name}": value for name, value in metrics.items()}
        named["train/epoch"] = (step + 1) / self.loader.order.steps_per_epoch
        named["timing/step_total"] = seconds
        self.log(step + 1, named)

    def eval_every(self) -> int:
        return self.config.eval.steps if self.config.eval.steps > 0 else self.loader.order.steps_per_epoch

    def is_due(self, step: int, every: int) -> bool:
        return bool(self.eval_sets) and ((step + 1) % every == 0 or step + 1 == self.loader.total_steps)

    def evaluate(self, step: int) -> None:
        """Evaluation loss of every held-out set; keeps the best checkpoint."""
        metrics = evaluate(self.model, self.task, self.eval_sets, self.config.train)
        self.log(step, metrics, always=True)
        key = self.config.ckpt.best_metric_key or f"eval/{self.task.main_metric}"
        if key != "none" and (self.best is None or metrics[key] < self.best):
            self.best = metrics[key]
            if self.config.ckpt.save_steps > 0:
                self.save(step, kind="best")

    def log(self, step: int, metrics: dict[str, float], always: bool = False) -> None:
        self.last = self.last | metrics
        if self.logger is None:
            return
        if always or step % self.config.logger.logging_steps == 0:
            self.logger.log(step, metrics)
        self.progress.update(step, metrics)
        self.folder.step(step)

    def save(self, step: int, kind: str = "step") -> None:
        """A checkpoint of the whole state after optimiser step `step`."""
        if self.world.is_main:
            self.store.begin(step, kind)
        self.world.barrier()
        folder = self.store.path / f"{kind}_{step:06d}.tmp"
        self.model.save_state(folder)
        if self.config.ckpt.save_hf:
            self.save_hf(folder / "hf")
        self.world.barrier()
        if self.world.is_main:
            self.store.commit(step, {"step": step, "best": self.best}, kind)
        self.world.barrier()

    def resume(self) -> int:
        """Load the newest checkpoint when asked; the step to go on with."""
        checkpoint = self.store.latest() if self.config.ckpt.load_enable else None
        if checkpoint is None:
            return 0
        self.model.load_state(checkpoint.path)
        self.best = checkpoint.state()["best"]
        return checkpoint.step

    def close(self) -> None:
        self.progress.close()
        output = Path(self.config.ckpt.output_dir) if self.config.ckpt.output_dir else self.folder.model
        self.save_hf(output)
        if self.logger is not None:
            self.logger.close()
