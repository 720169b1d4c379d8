"""Sends the metrics of each step and evaluation to MLflow: to the server that MLFLOW_TRACKING_URI names, for which
`pip install mlflow-skinny` is enough, or to the file mlflow.db in the working folder, which also needs sqlalchemy and
alembic. A continued run of the suite continues its run of MLflow:

python run.py task=sft "train.callbacks=[experiments/callbacks/metrics_to_mlflow.py:MetricsToMlflow]"
"""

from __future__ import annotations

from collections.abc import Mapping

import mlflow

from rlhf_suite.train.callbacks import Started

ENDS = {"done": "FINISHED", "stopped": "KILLED", "failed": "FAILED"}


class MetricsToMlflow:
    def __init__(self) -> None:
        self.run: str | None = None

    def on_start(self, started: Started) -> None:
        self.run = mlflow.start_run(run_id=self.run, run_name=started.folder.name).info.run_id

    def on_step(self, step: int, metrics: Mapping[str, float], samples: object) -> None:
        mlflow.log_metrics(dict(metrics), step=step)

    def on_evaluation(self, step: int, metrics: Mapping[str, float]) -> None:
        mlflow.log_metrics(dict(metrics), step=step)

    def on_end(self, status: str) -> None:
        mlflow.end_run(ENDS[status])

    def state(self) -> str | None:
        return self.run

    def load(self, run: str) -> None:
        self.run = run
