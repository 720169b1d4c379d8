"""What a run reports at every step: metrics with the seconds of each phase, and the progress bar."""

from __future__ import annotations

import threading
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, closing, contextmanager, nullcontext
from typing import TypeVar

from rlhf_suite.config.declarations.logger import LoggerConfig
from rlhf_suite.run_folders.run_folder import RunFolder
from rlhf_suite.tracking.console import PhaseProgress, Progress, show_line
from rlhf_suite.tracking.metrics import MetricLogger, find_damaged_lines
from rlhf_suite.tracking.timeline import Timeline
from rlhf_suite.waits import waiting

T = TypeVar("T")
SHORT_S = 3.0  # a phase before the first step that takes no longer shows nothing
TICK_S = 0.1  # between two looks of the progress bar


class Journal:
    """Writes the metrics and messages of one run. `log` may be called several times per step; timings go with the first
    call."""

    def __init__(self, config: LoggerConfig, folder: RunFolder, task: str) -> None:
        self.config, self.folder, self.task = config, folder, task
        self.seconds: dict[str, float] = defaultdict(float)  # of the phases of the step
        self.beside: dict[str, float] = defaultdict(float)  # of what other threads did meanwhile
        self.lock = threading.Lock()  # of `beside`
        self.timeline = Timeline()

    def open(self, start: int, total: int) -> None:
        """Open the metric sinks. Metrics of steps after `start` are dropped, since these steps will be run again."""
        for number in find_damaged_lines(self.folder.metrics):
            self.warn(f"{self.folder.metrics}:{number} is damaged, so it is ignored: it is not a row of metrics")
        self.logger = MetricLogger(self.config, self.folder, start)
        self.progress = Progress(self.config, self.task, total, start)
        self.timeline.open_window()

    def info(self, message: str) -> None:
        """Print a message to the console, unless logger.progress is off."""
        if message and self.config.progress:
            show_line(message)

    def warn(self, message: str) -> None:
        """Print a message that a user must see to the error stream, also if logger.progress is off."""
        show_line(message, to_stderr=True)

    @contextmanager
    def phase(self, name: str, who: str | None = "driver") -> Iterator[None]:
        """Measure the time of a phase of the step, in which the driver waits for `who`, and show its name. None: the
        timeline knows from elsewhere who was busy."""
        self.show_phase(name)
        with self.measure(self.seconds, name, who):
            yield

    @contextmanager
    def background(self, name: str, who: str | None = "driver") -> Iterator[None]:
        """Measure the time of something that another thread does during the phases of the step."""
        with self.measure(self.beside, name, who):
            yield

    @contextmanager
    def measure(self, seconds: dict[str, float], name: str, who: str | None) -> Iterator[None]:
        began = time.perf_counter()
        try:
            with waiting(f"the phase {name}"), nullcontext() if who is None else self.timeline.busy(who, name):
                yield
        finally:
            with self.lock:
                seconds[name] += time.perf_counter() - began

    def show_phase(self, name: str) -> None:
        """Show what the run is doing now."""
        if hasattr(self, "progress"):
            self.progress.phase(name)

    def track(self, items: Iterable[T], total: int | None, unit: str) -> Iterator[T]:
        """Yield the items as they come, and show how many have come and how long the others may take. `total`: how many
        there are, if that is known. Before the run begins, a phase that lasts has a bar of its own."""
        began, said = time.monotonic(), 0.0
        shown = getattr(self, "progress", None)
        with ExitStack() as stack:
            for done, item in enumerate(items, start=1):
                now = time.monotonic()
                if shown is None and now - began >= SHORT_S:
                    shown = stack.enter_context(closing(PhaseProgress(self.config, self.task, total)))
                if shown is not None and (done == total or now - said >= TICK_S):
                    said = now
                    shown.part(unit, done, total, began)
                yield item

    def show_part(self, unit: str, done: int, total: int, began: float) -> None:
        """Show how far a phase of a step is that began at `began` (time.monotonic)."""
        if hasattr(self, "progress"):
            self.progress.part(unit, done, total, began)

    def log(self, step: int, metrics: dict[str, float], always: bool = False) -> None:
        """Write the metrics of a step with the seconds of every phase since the last call.

        Metrics of an evaluation (`always`) are written and shown each time, others every logger.logging_steps steps.
        """
        timings = {f"timing/{name}": value for name, value in self.seconds.items()}
        if self.seconds:
            timings["timing/step_total"] = sum(self.seconds.values())
        with self.lock:
            timings |= {f"timing/{name}": value for name, value in self.beside.items()}
            self.beside.clear()
        self.seconds.clear()
        self.write(step, metrics | timings, always)
        if not always:
            self.progress.show_step(step, metrics)
        self.folder.record_step(step)

    def log_late(self, step: int, metrics: dict[str, float], always: bool = False) -> None:
        """Write further metrics of a step that is over, such as those of an evaluation (`always`). The timings of the
        next step are not touched."""
        self.write(step, metrics, always)

    def write(self, step: int, metrics: dict[str, float], always: bool) -> None:
        """Write a row of metrics if it is due; with the results of an evaluation (`always`) show its samples too."""
        if always or step % self.config.logging_steps == 0:
            self.logger.log(step, metrics)
        if always:
            self.logger.log_samples(step)
            self.progress.print_evaluation(step, metrics)

    def close(self) -> None:
        """Close the progress bar and the metric sinks."""
        if hasattr(self, "progress"):
            self.progress.close()
            self.logger.close()
