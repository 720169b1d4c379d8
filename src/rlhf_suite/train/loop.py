"""The loop around the steps of every training run: resume, evaluate, train, save, stop when asked to, export.

What a step and an evaluation are, the kind of run says: `Trainer` below for the supervised tasks, `rl.pipeline` for
reinforcement learning. A run that is resumed goes on as if nothing had happened.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from rlhf_suite.config.declarations.eval import EvalConfig
from rlhf_suite.config.declarations.train import TrainConfig
from rlhf_suite.launch.stop import Stopped, defer_signals
from rlhf_suite.tracking.journal import Journal
from rlhf_suite.tracking.metrics import last_values, read_rows
from rlhf_suite.train.callbacks import Callbacks, Evaluate, Save, Stop
from rlhf_suite.train.saving import Saver
from rlhf_suite.train.trained_worker import SupervisedGroup


@dataclass(kw_only=True)
class TrainingLoop(ABC):
    """The loop; a subclass says what it does at each place."""

    train: TrainConfig
    evaluation: EvalConfig
    saver: Saver
    journal: Journal
    total_steps: int
    callbacks: Callbacks = field(default_factory=Callbacks)
    evaluated_beside_plan: int | None = None  # a step that is evaluated because of a callback
    last: dict[str, float] = field(default_factory=dict)  # the last value of every metric
    row: dict[str, float] = field(default_factory=dict)  # the metrics of the newest step
    row_step: int = 0

    def run(self) -> dict[str, float]:
        """Train to the end; return the last value of every metric."""
        self.saver.on_checkpoint = self.callbacks.checkpoint
        status = "failed"
        try:
            self.train_to_the_end()
            status = "done"
        except (Stopped, KeyboardInterrupt):
            status = "stopped"
            raise
        finally:
            self.callbacks.end(status)
        return self.last

    def train_to_the_end(self) -> None:
        """Resume if asked to, train all steps, and write the models."""
        for said in self.saver.rehearse(self.exported):
            self.journal.warn(said)
        start = self.saver.resume(self.journal.warn)
        self.journal.open(start, self.total_steps)
        self.last = last_values(read_rows(self.journal.folder.metrics))
        self.begin(start)
        self.callbacks.start(self.journal.folder.path, start, self.total_steps)
        if start == 0 and self.evaluation.on_start:
            self.evaluate(step=0)
        with defer_signals():
            for step in range(start, self.total_steps):
                if self.saver.stops_early(step, self.train.early_stopping_patience, self.end_early):
                    break
                self.train_step(step)
                self.callbacks.step(step + 1, self.row, self.samples)
                self.plan_evaluation(step + 1)
                evaluation = self.evaluate(step + 1)
                self.save(step + 1, evaluation)
                if (stop := self.callbacks.take(Stop)) is not None:
                    self.end_early(f"A callback ended the run after step {step + 1}: {stop.reason or 'no reason'}")
                    break
            self.finish_step()
            for model in self.exported:
                self.saver.export(model)
            self.saver.check_models()

    def save(self, step: int, evaluation: dict[str, float]) -> None:
        """Write the checkpoints that are due, and that a callback has asked for; end the run if a signal says so."""
        with self.journal.phase("save"):
            self.saver.save_if_due(step, evaluation, self.finish_step)
            if self.callbacks.take(Save) is not None and self.saver.saved != step:
                self.saver.save(step, "step", self.finish_step)
            self.saver.stop_if_requested(step, self.finish_step)

    def end_early(self, said: str) -> None:
        """Say why the run ends before its last step, and keep that in its folder."""
        self.journal.warn(said)
        self.journal.folder.record_early_end(said)

    def samples(self) -> Any:
        """Return the samples of the newest step as a table, for callbacks; None where a step has none."""
        return None

    def begin(self, start: int) -> None:  # noqa: B027 - most kinds of run have nothing to do here
        """Get ready for step `start` (0-based); the models are already those of that step."""

    @abstractmethod
    def train_step(self, step: int) -> None:
        """Train step `step` (0-based) and log its metrics."""

    def finish_step(self) -> dict[str, float]:
        """Wait for what the newest step has left under way, and return its metrics. An evaluation, a checkpoint and the
        end of the run come after it."""
        return self.row

    @property
    @abstractmethod
    def steps_between_evaluations(self) -> int:
        """The interval of evaluations; 0: there are none."""

    @abstractmethod
    def measure(self, step: int) -> dict[str, float]:
        """Return the metrics of an evaluation after `step` steps."""

    def is_evaluated(self, step: int) -> bool:
        """Return whether there is an evaluation after `step` steps: before the first step, at the interval of
        evaluations, and after the last step."""
        every = self.steps_between_evaluations
        return every > 0 and (step % every == 0 or step in (self.total_steps, self.evaluated_beside_plan))

    def plan_evaluation(self, step: int) -> None:
        """Take note of whether a callback wants an evaluation after `step`, or wants it to be the last one."""
        is_asked = self.callbacks.take(Evaluate) is not None
        self.evaluated_beside_plan = step if is_asked or self.callbacks.wants(Stop) else None
        if is_asked and self.steps_between_evaluations == 0:
            self.journal.warn("A callback asks for an evaluation, and there is nothing to evaluate on (eval.dataset)")

    def evaluate(self, step: int) -> dict[str, float]:
        """Evaluate if `step` has an evaluation, and return its metrics."""
        if not self.is_evaluated(step):
            return {}
        self.finish_step()
        with self.journal.phase("evaluation"):
            metrics = self.measure(step)
        self.log(step, metrics, always=True)
        self.callbacks.evaluation(step, metrics)
        return metrics

    @property
    def exported(self) -> tuple[str, ...]:
        """The models that the run leaves."""
        return ("actor",)

    def log(self, step: int, metrics: dict[str, float], always: bool = False) -> None:
        """Log metrics and keep them as the last ones."""
        self.keep(step, metrics)
        self.journal.log(step, metrics, always)

    def log_late(self, step: int, metrics: dict[str, float], always: bool = False) -> None:
        """Log further metrics of a step that is over, and keep them."""
        self.keep(step, metrics)
        self.journal.log_late(step, metrics, always)

    def keep(self, step: int, metrics: dict[str, float]) -> None:
        """Keep metrics as the last ones."""
        self.row = self.row | metrics if step == self.row_step else dict(metrics)
        self.row_step = step
        self.last |= metrics


@dataclass(kw_only=True)
class Trainer(TrainingLoop):
    """The loop of every supervised task. It drives the ranks of one trained model, in this process or on Ray actors."""

    group: SupervisedGroup
    steps_per_epoch: int

    def train_step(self, step: int) -> None:
        with self.journal.phase("train"):
            metrics = self.group.train_step(step)
        metrics["perf/tokens_per_s"] = metrics["train/tokens"] / self.journal.seconds["train"]
        self.log(step + 1, metrics | {"train/epoch": (step + 1) / self.steps_per_epoch})

    @property
    def steps_between_evaluations(self) -> int:
        """eval.steps, else once per epoch; 0 without eval.dataset."""
        if self.evaluation.dataset is None:
            return 0
        return self.evaluation.steps if self.evaluation.steps > 0 else self.steps_per_epoch

    def measure(self, step: int) -> dict[str, float]:
        return self.group.evaluate(step, partial(self.journal.track, unit="evaluated batches"))
