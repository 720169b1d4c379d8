"""The optimiser steps of a server: what their passes came to, and where the time between two of them went."""

from __future__ import annotations

import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np

from rlhf_suite.data.batch import require_column
from rlhf_suite.data.trajectory import Experience
from rlhf_suite.disk import DiskError
from rlhf_suite.rl.datum import LossOutput
from rlhf_suite.rl.primitives import CROSS_ENTROPY
from rlhf_suite.tracking.journal import Journal
from rlhf_suite.train_server.ledgers import Ledgers

SAMPLING, WAITING = "sampling", "waiting_for_clients"  # phases beside the calls of models
CLIPS = ("ppo_clip_ratio", "ppo_clip_ratio_low", "ppo_clip_ratio_high")


class Clock:
    """Says what a server does at each moment: a call of a model, else samples, else it waits for clients. So the
    seconds of these phases add up to the time that has passed."""

    def __init__(self, now: Callable[[], float] = time.perf_counter) -> None:
        self.now, self.since = now, now()
        self.seconds: dict[str, float] = defaultdict(float)
        self.phases: list[str] = []  # under way
        self.lock = threading.Lock()

    @contextmanager
    def during(self, phase: str) -> Iterator[None]:
        """Count the time of the block as that of a phase."""
        with self.lock:
            self.advance()
            self.phases.append(phase)
        try:
            yield
        finally:
            with self.lock:
                self.advance()
                self.phases.remove(phase)

    def advance(self) -> None:
        """Count the time since the last call for the phase that was under way."""
        idle = SAMPLING if self.phases else WAITING
        phase = next((phase for phase in self.phases if phase != SAMPLING), idle)
        now = self.now()
        self.seconds[phase] += now - self.since
        self.since = now

    def take(self) -> dict[str, float]:
        """Return the seconds of each phase since the last call."""
        with self.lock:
            self.advance()
            seconds, self.seconds = self.seconds, defaultdict(float)
        return seconds


@dataclass
class PassSums:
    """What the passes of an optimiser step came to, over the positions that are trained on: those with a weight, or
    with an advantage. What a client gives for the others, such as log-probs of 0 for a prompt, counts for nothing."""

    sums: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    counts: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    has_negative: bool = False  # weights are the gradients of a client's own loss, and that has no mean per token

    def add(self, loss: str, batch: Experience, output: LossOutput) -> None:
        """Add a pass with a gradient."""
        log_probs = np.concatenate(output.log_probs).astype(np.float64)
        mask = batch.mask.numpy() > 0
        if loss == CROSS_ENTROPY:
            weights = require_column(batch.correction, "correction").numpy().astype(np.float64)[mask]
            self.has_negative |= bool((weights < 0).any())
            self.count("gpt_loss", output.loss_sum, weights.sum())
        else:
            trained = mask if loss == "dro" else mask & (require_column(batch.advantages, "advantages").numpy() != 0)
            old, number = require_column(batch.old_log_probs, "old_log_probs").numpy(), float(trained.sum())
            self.count("policy_loss", output.loss_sum, number)
            self.count("ppo_kl", float((old - log_probs)[trained].sum()), number)
            for name in CLIPS:
                # A mean over the mask, in which only trained positions are not 0.
                if (share := output.metrics.get(f"train/{name}")) is not None:
                    self.count(name, share * float(mask.sum()), number)
        if (balance := output.metrics.get("train/aux_loss")) is not None:
            self.count("aux_loss", balance * len(log_probs), len(log_probs))

    def count(self, name: str, total: float, number: float) -> None:
        """Add to the sum of a metric, and to the number of what it is a mean over."""
        self.sums[name] += total
        self.counts[name] += number

    def means(self) -> dict[str, float]:
        """Return the metrics; what is a mean over nothing is absent."""
        known = {name: total / self.counts[name] for name, total in self.sums.items() if self.counts[name] > 0}
        if self.has_negative:
            known.pop("gpt_loss", None)
        return {f"train/{name}": value for name, value in known.items()}


class Steps:
    """Writes the metrics of the optimiser steps of all models, in the order in which they were taken, and the samples
    before each. A full disk delays rows until there is room again."""

    def __init__(self, journal: Journal, ledgers: Ledgers, number: int) -> None:
        self.journal, self.ledgers, self.number, self.clock = journal, ledgers, number, Clock()
        self.unwritten: list[tuple[int, dict[str, float]]] = []
        journal.open(number, 0)

    def log(self, metrics: dict[str, float]) -> None:
        """Write the metrics of a step, with the seconds of each phase since the one before it."""
        self.number += 1
        timings = {f"timing/{phase}": seconds for phase, seconds in self.clock.take().items()}
        timings["timing/step_total"] = sum(timings.values())
        self.unwritten.append((self.number, metrics | self.ledgers.end_step() | timings))
        self.write()

    def write(self) -> None:
        """Write the rows that wait for it."""
        try:
            while self.unwritten:
                self.journal.write(*self.unwritten[0], always=False)
                step, metrics = self.unwritten.pop(0)
                self.journal.progress.show_step(step, metrics)
                self.journal.folder.record_step(step)
        except DiskError as error:
            self.journal.warn(f"Warning: {len(self.unwritten)} rows of metrics wait to be written: {error}")

    def close(self) -> None:
        """Try once more to write what waits."""
        if self.unwritten:
            self.write()
