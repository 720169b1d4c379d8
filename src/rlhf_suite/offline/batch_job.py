"""An offline job: start or continue its output file, write it chunk by chunk, and move it to its place at the end."""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlhf_suite.config.declarations.generate import OutputConfig, output_file
from rlhf_suite.config.declarations.logger import LoggerConfig
from rlhf_suite.errors import UserError
from rlhf_suite.launch.stop import Stopped, defer_signals, get_stop_signal
from rlhf_suite.offline.part_file import PartFile
from rlhf_suite.run_folders.run_folder import RunFolder
from rlhf_suite.tracking.console import Progress
from rlhf_suite.tracking.journal import Journal


@dataclass(frozen=True)
class Done:
    """The output rows of a finished chunk of the input, which ends before row `stop`, and sums over the chunk."""

    stop: int
    rows: list[dict[str, Any]]
    sums: dict[str, float]


class BatchJob:
    """Writes the output for the rows `rows` of the input. `default` is the output file if no flag names another."""

    def __init__(self, task: str, output: OutputConfig, default: Path, rows: range, resume: bool) -> None:
        folder = RunFolder(default.parent)
        self.rows, self.journal = rows, Journal(LoggerConfig(), folder, task)
        path = output_file(output.output_path, output.shard, default)
        self.part = PartFile(path, folder.path / "progress.json", rows.start, resume)
        self.speed: dict[str, float] = {}  # since this process started

    @property
    def left(self) -> range:
        """Return the input rows that are not done yet."""
        return range(0) if self.part.progress.done else range(self.part.progress.next_row, self.rows.stop)

    def write(self, chunks: Iterable[Done], unit: str) -> None:
        """Write chunks as they finish, until a signal asks to stop. The speed is measured in `unit`, one of
        the sums.
        """
        start, began, count = self.rows.start, time.perf_counter(), 0.0
        progress = Progress(LoggerConfig(), self.journal.task, len(self.rows), self.left.start - start)
        try:
            with defer_signals():
                for done in chunks:
                    self.part.append(done.rows, done.stop, done.sums)
                    count += done.sums[unit]
                    self.speed = {f"{unit}_per_s": count / (time.perf_counter() - began)}
                    progress.show_step(done.stop - start, means(self.part.progress.totals) | self.speed)
                    if (number := get_stop_signal()) is not None:
                        raise Stopped(number, f"row {done.stop}")
        finally:
            progress.close()

    def finish(self) -> dict[str, float]:
        """Move the output to its place; return counts and means over all of its rows.

        Raises:
            UserError: no row of the input can be used.
        """
        totals = self.part.progress.totals
        if self.rows and totals.get("skipped") == len(self.rows):
            raise UserError(f"none of the {len(self.rows)} rows can be used; the reasons are above")
        self.part.finish()
        metrics = means(totals) | self.speed
        self.journal.info(", ".join(f"{name} {value:.6g}" for name, value in metrics.items()))
        self.journal.info(f"Output: {self.part.path}")
        return metrics


def means(totals: dict[str, float]) -> dict[str, float]:
    """Return the metrics of the sums: counts, the share of truncated samples, and the mean score."""
    result = {name: value for name, value in totals.items() if name not in ("truncated", "scored", "score")}
    if totals.get("samples"):
        result["truncated_rate"] = totals["truncated"] / totals["samples"]
    if totals.get("scored"):
        result["score"] = totals["score"] / totals["scored"]
    return result
