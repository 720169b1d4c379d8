"""Sends the metrics of each step and evaluation to Trackio (`pip install trackio`), which keeps them on this machine;
`trackio show --project rlhf_suite` shows them. A continued run of the suite continues its run of Trackio:

python run.py task=sft "train.callbacks=[experiments/callbacks/metrics_to_trackio.py:MetricsToTrackio]"
"""

from __future__ import annotations

from collections.abc import Mapping

import trackio

from rlhf_suite.train.callbacks import Started


class MetricsToTrackio:
    def on_start(self, started: Started) -> None:
        trackio.init(project="rlhf_suite", name=started.folder.name, resume="allow", embed=False)

    def on_step(self, step: int, metrics: Mapping[str, float], samples: object) -> None:
        trackio.log(dict(metrics), step=step)

    def on_evaluation(self, step: int, metrics: Mapping[str, float]) -> None:
        trackio.log(dict(metrics), step=step)

    def on_end(self, status: str) -> None:
        trackio.finish()
