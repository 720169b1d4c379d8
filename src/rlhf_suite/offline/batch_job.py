"""A job that turns rows into rows of one output file: opened or continued, written chunk by chunk, put in its place."""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlhf_suite.config.generate import OutputConfig, output_file
from rlhf_suite.config.logger import LoggerConfig
from rlhf_suite.errors import UserError
from rlhf_suite.launch.stop import Stopped, deferred, requested
from rlhf_suite.offline.part_file import PartFile
from rlhf_suite.tracking.console import Progress
from rlhf_suite.tracking.journal import Journal
from rlhf_suite.tracking.run_folder import RunFolder


@dataclass(frozen=True)
class Done:
    """A chunk's rows for the output, which cover the input up to `stop`, and sums over all that it was made of."""

    stop: int
    rows: list[dict[str, Any]]
    sums: dict[str, float]


class BatchJob:
    """The rows `rows` of the input on their way to the output. `default` names the file in the run folder."""

    def __init__(self, task: str, output: OutputConfig, default: Path, rows: range, resume: bool) -> None:
        folder = RunFolder(default.parent)
        self.rows, self.journal = rows, Journal(LoggerConfig(), folder, task)
        path = output_file(output.output_path, output.shard, default)
        self.part = PartFile(path, folder.path / "progress.json", rows.start, resume)
        self.speed: dict[str, float] = {}  # of this process

    @property
    def left(self) -> range:
        """The rows that are still to be done."""
        return range(0) if self.part.progress.done else range(self.part.progress.next_row, self.rows.stop)

    def write(self, chunks: Iterable[Done], unit: str) -> None:
        """Write the chunks as they come, until a signal asks to stop; the speed is that of the sum `unit`."""
        start, began, count = self.rows.start, time.perf_counter(), 0.0
        progress = Progress(LoggerConfig(), self.journal.task, len(self.rows), self.left.start - start)
        try:
            with deferred():
                for done in chunks:
                    self.part.append(done.rows, done.stop, done.sums)
                    count += done.sums[unit]
                    self.speed = {f"{unit}_per_s": count / (time.perf_counter() - began)}
                    progress.update(done.stop - start, means(self.part.progress.totals) | self.speed)
                    if (number := requested()) is not None:
                        raise Stopped(number, f"row {done.stop}")
        finally:
            progress.close()

    def finish(self) -> dict[str, float]:
        """Put the output in its place; the counts and means of all of it."""
        totals = self.part.progress.totals
        if self.rows and totals.get("skipped") == len(self.rows):
            raise UserError(f"none of {len(self.rows)} rows can be used; the reasons are above")
        self.part.finish()
        metrics = means(totals) | self.speed
        self.journal.say(", ".join(f"{name} {value:.6g}" for name, value in metrics.items()))
        self.journal.say(f"Output: {self.part.path}")
        return metrics


def means(totals: dict[str, float]) -> dict[str, float]:
    """Counts as they are; of `truncated` its share of the samples, of `score` its mean."""
    result = {name: value for name, value in totals.items() if name not in ("truncated", "scored", "score")}
    if totals.get("samples"):
        result["truncated_rate"] = totals["truncated"] / totals["samples"]
    if totals.get("scored"):
        result["score"] = totals["score"] / totals["scored"]
    return result
