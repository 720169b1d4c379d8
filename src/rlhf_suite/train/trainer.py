"""The loop of every supervised task: optimise, log, evaluate, save; resume as if nothing had happened."""

from __future__ import annotations

from dataclasses import dataclass, field

from rlhf_suite.config.runs import SupervisedRun
from rlhf_suite.launch.stop import deferred
from rlhf_suite.tracking.journal import Journal
from rlhf_suite.tracking.metrics import last_values, read_rows
from rlhf_suite.train.saving import Saver
from rlhf_suite.train.trained_worker import SupervisedGroup


@dataclass
class Trainer:
    """Drives the ranks of one trained model (`SupervisedWorker`), in this process or on Ray actors."""

    config: SupervisedRun
    group: SupervisedGroup
    saver: Saver
    journal: Journal
    total_steps: int
    steps_per_epoch: int
    last: dict[str, float] = field(default_factory=dict)

    def fit(self) -> dict[str, float]:
        """Train to the end; returns the last value of every metric."""
        start = self.saver.resume(self.journal.warn)
        self.journal.begin(start, self.total_steps)
        self.last = last_values(read_rows(self.journal.folder.metrics))
        if start == 0 and self.config.eval.on_start:
            self.evaluate(step=0)
        with deferred():
            for step in range(start, self.total_steps):
                if self.saver.stops_early(step, self.config.train.early_stopping_patience, self.journal.warn):
                    break
                self.train_step(step)
                evaluation = self.evaluate(step + 1)
                with self.journal.phase("save"):
                    self.saver.save_if_due(step + 1, evaluation)
                    self.saver.stop_if_requested(step + 1)
            self.saver.export()
        return self.last

    def train_step(self, step: int) -> None:
        """One optimiser step (0-based)."""
        with self.journal.phase("train"):
            metrics = self.group.train_step(step)
        metrics["perf/tokens_per_s"] = metrics["train/tokens"] / self.journal.seconds["train"]
        self.log(step + 1, metrics | {"train/epoch": (step + 1) / self.steps_per_epoch})

    def evaluate(self, step: int) -> dict[str, float]:
        """Evaluation loss before the first step, every eval.steps (else once per epoch), and after the last step."""
        every = self.config.eval.steps if self.config.eval.steps > 0 else self.steps_per_epoch
        if self.config.eval.dataset is None or (step % every and step != self.total_steps):
            return {}
        with self.journal.phase("evaluation"):
            metrics = self.group.evaluate(step)
        self.log(step, metrics, always=True)
        return metrics

    def log(self, step: int, metrics: dict[str, float], always: bool = False) -> None:
        self.last |= metrics
        self.journal.log(step, metrics, always)
