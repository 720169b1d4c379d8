"""Sends the metrics of each step and evaluation to a table of SQLite beside the run folder. To use a client of MLflow,
Trackio or SwanLab instead, call it in the same methods:

python run.py task=sft "train.callbacks=[experiments/callbacks/metrics_to_sqlite.py:MetricsToSqlite]"
"""

from __future__ import annotations

import sqlite3
from collections.abc import Mapping

from rlhf_suite.train.callbacks import Started


class MetricsToSqlite:
    def on_start(self, started: Started) -> None:
        self.base = sqlite3.connect(started.folder.parent / "metrics.sqlite")
        self.run = started.folder.name
        self.base.execute("CREATE TABLE IF NOT EXISTS metrics (run, step, name, value)")
        self.base.execute("DELETE FROM metrics WHERE run = ? AND step > ?", (self.run, started.step))

    def on_step(self, step: int, metrics: Mapping[str, float], samples: object) -> None:
        rows = [(self.run, step, name, value) for name, value in metrics.items()]
        self.base.executemany("INSERT INTO metrics VALUES (?, ?, ?, ?)", rows)
        self.base.commit()

    def on_evaluation(self, step: int, metrics: Mapping[str, float]) -> None:
        self.on_step(step, metrics, None)

    def on_end(self, status: str) -> None:
        self.base.close()
