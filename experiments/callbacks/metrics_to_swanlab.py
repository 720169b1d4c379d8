"""Sends the metrics of each step and evaluation to SwanLab (`pip install swanlab`): to its server if SWANLAB_MODE is
cloud, else to the folder swanlog, which `swanlab sync` sends later. A continued run of the suite is a new run there:

python run.py task=sft "train.callbacks=[experiments/callbacks/metrics_to_swanlab.py:MetricsToSwanlab]"
"""

from __future__ import annotations

import os
from collections.abc import Mapping

import swanlab

from rlhf_suite.train.callbacks import Started


class MetricsToSwanlab:
    def on_start(self, started: Started) -> None:
        mode = os.environ.get("SWANLAB_MODE", "offline")
        swanlab.init(project="rlhf_suite", experiment_name=started.folder.name, mode=mode)

    def on_step(self, step: int, metrics: Mapping[str, float], samples: object) -> None:
        swanlab.log(dict(metrics), step=step)

    def on_evaluation(self, step: int, metrics: Mapping[str, float]) -> None:
        swanlab.log(dict(metrics), step=step)

    def on_end(self, status: str) -> None:
        swanlab.finish()
