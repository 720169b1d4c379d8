"""The console output of a run: a progress bar on a terminal, a line now and then elsewhere, and every evaluation."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TaskID, TextColumn, TimeRemainingColumn
from rich.progress import Progress as Bar

from rlhf_suite.config.declarations.eval import QUANTILES
from rlhf_suite.config.declarations.logger import LoggerConfig
from rlhf_suite.foreign_text import printable

# The metrics of the progress line, by the last part of their name; the first SHOWN that a task has are shown.
HEADLINES = (
    "reward",
    "pass1",
    "gpt_loss",
    "loss",
    "policy_loss",
    "kl",
    "acc",
    "auc",
    "response_length",
    "grad_norm",
    "actor_grad_norm",
    "tokens_per_s",
    "score",
)
SHOWN = 4
LINES_PER_RUN = 20
PART_S = 30.0  # between two lines about a long phase where there is no terminal
# Endings of the names of evaluation metrics that describe the evaluation, or that are too many for one line.
NOT_RESULTS = ("_stderr", "/num_samples", *QUANTILES)


def show_line(text: str, limit: int = 4000, to_stderr: bool = False) -> None:
    """Print a line of a run. What others wrote in it acts neither as terminal code nor as markup."""
    line = printable(text, limit, keep_lines=True)
    Console(stderr=to_stderr).print(line, highlight=False, markup=False, soft_wrap=True)


class Progress:
    """The progress of a run of `total` steps (0: nobody knows) that continues after step `start`. Silent without
    `visible` or logger.progress."""

    def __init__(
        self,
        config: LoggerConfig,
        task: str,
        total: int,
        start: int,
        visible: bool = True,
        console: Console | None = None,
    ) -> None:
        self._console = console or Console()
        self._task, self._total, self._start = task, total, start
        self._latest: dict[str, float] = {}
        self._began = time.monotonic()
        self._printed = -1  # the last step that was printed
        self._said = 0.0  # when a line about a long phase was printed
        self._bar: Bar | None = None
        self._visible = config.progress and visible
        if self._visible and self._console.is_terminal:
            self._open_bar()

    def _open_bar(self) -> None:
        """Start the progress bar."""
        columns = TextColumn("[bold]{task.description}"), BarColumn(), MofNCompleteColumn()
        extra = TimeRemainingColumn(), TextColumn("{task.fields[phase]}"), TextColumn("{task.fields[numbers]}")
        self._bar = Bar(*columns, *extra, console=self._console, redirect_stdout=False, redirect_stderr=False)
        self._id: TaskID = self._bar.add_task(
            self._task, total=self._total, completed=self._start, phase="", numbers=""
        )
        self._bar.start()

    def phase(self, name: str) -> None:
        """Show the current phase of the step (on a terminal)."""
        if self._bar is not None:
            self._bar.update(self._id, phase=name)

    def part(self, unit: str, done: int, total: int | None, began: float) -> None:
        """Show how far a phase is that began at `began` (time.monotonic): on a terminal with each part, elsewhere in a
        line every PART_S seconds. Without a total nobody knows how long it takes."""
        now = time.monotonic()
        far, left = f"{unit} {done}", ""
        if total is not None:
            far, left = f"{far}/{total}", f"{clock((now - began) / done * max(0, total - done))} left"
        if self._bar is not None:
            self._show_part(done, ", ".join(filter(None, (far, left))))
        elif self._visible and done != total and now - max(began, self._said) >= PART_S:
            self._said = now
            self._console.print(f"{self._task}: {far}  {left}".rstrip(), highlight=False, markup=False)

    def _show_part(self, done: int, text: str) -> None:
        """Show on a terminal how many parts of the current phase are done."""
        assert self._bar is not None
        self._bar.update(self._id, phase=text)

    def show_step(self, step: int, metrics: Mapping[str, float]) -> None:
        """Show that optimiser step `step` (from 1) is done."""
        self._latest |= metrics
        if self._bar is not None:
            self._bar.update(self._id, completed=step, numbers=headline(self._latest))
        elif self._visible and self._is_line_due(step):
            self._printed = step
            self._console.print(
                f"{self._task} {self._far(step)}  {headline(metrics)}  {self._format_time_left(step)}".rstrip(),
                soft_wrap=True,
                highlight=False,
                markup=False,
            )

    def print_evaluation(self, step: int, metrics: Mapping[str, float]) -> None:
        """Print the results of an evaluation after step `step`, on every kind of console: users wait for them."""
        self._latest |= metrics
        if self._bar is not None:
            self._bar.update(self._id, completed=step, numbers=headline(self._latest))
        if self._visible:
            line = f"{self._task} {step}/{self._total}  evaluation: {results(metrics)}"
            # the names contain those of data sources, so they may contain anything
            self._console.print(printable(line), soft_wrap=True, highlight=False, markup=False)

    def _is_line_due(self, step: int) -> bool:
        """Return whether this step is printed where there is no terminal."""
        every = max(1, self._total // LINES_PER_RUN)
        is_next = self._printed < 0 or step // every > self._printed // every
        return is_next or (step == self._total and step != self._printed)

    def _far(self, step: int) -> str:
        """Return how far the run is: of all steps, where their number is known."""
        return f"{step}/{self._total}" if self._total else str(step)

    def _format_time_left(self, step: int) -> str:
        """Return the estimated time left, as `1:05 left`."""
        done = step - self._start
        if done <= 0 or not self._total:
            return ""
        return f"{clock((time.monotonic() - self._began) / done * (self._total - step))} left"

    def close(self) -> None:
        """Remove the progress bar."""
        if self._bar is not None:
            self._bar.stop()


class PhaseProgress(Progress):
    """The progress of a phase before the first step, which has the bar for itself."""

    def __init__(self, config: LoggerConfig, task: str, total: int | None, console: Console | None = None) -> None:
        self._is_known = total is not None
        super().__init__(config, task, total or 0, 0, console=console)

    def _open_bar(self) -> None:
        if self._is_known:
            super()._open_bar()

    def _show_part(self, done: int, text: str) -> None:
        assert self._bar is not None
        self._bar.update(self._id, completed=done, phase=text)


def clock(seconds: float) -> str:
    """Return a time in minutes and seconds, as `1:05`."""
    return f"{int(seconds // 60)}:{int(seconds % 60):02d}"


def headline(metrics: Mapping[str, float]) -> str:
    """Return the few numbers that show how training goes, as `reward 0.71  kl 0.002`."""
    values = {}
    for name in HEADLINES:
        for key, title in ((name, name), (f"train/{name}", name), (f"eval/{name}", f"eval {name}")):
            if key in metrics:
                values[title] = metrics[key]
    return "  ".join(f"{name} {value:.4g}" for name, value in list(values.items())[:SHOWN])


def results(metrics: Mapping[str, float]) -> str:
    """Return the results of an evaluation, with known standard errors: `pass1 0.89 ± 0.02  pass4 0.98`."""
    shown = []
    for name in evaluation_results(metrics):
        error = f" ± {metrics[f'{name}_stderr']:.2g}" if f"{name}_stderr" in metrics else ""
        shown.append(f"{name.removeprefix('eval/')} {metrics[name]:.4g}{error}")
    return "  ".join(shown)


def evaluation_results(names: Iterable[str]) -> list[str]:
    """Return the names of an evaluation's results among metrics.

    `eval/acc` is over all sets together; `eval/<set>/acc` is omitted if there is only one set, since it says the same.
    """
    results = [name for name in names if name.startswith("eval/") and not name.endswith(NOT_RESULTS)]
    overall = {name for name in results if name.count("/") == 1}
    endings = tuple(name.removeprefix("eval") for name in overall)
    of_sets = {name: name.rpartition("/")[0] for name in results if name not in overall and name.endswith(endings)}
    only_one = len(set(of_sets.values())) == 1
    return [name for name in results if not (only_one and name in of_sets)]
