"""Writes prompt, response and reward of each sample to samples.csv in the folder of the run:

python run.py task=ppo "train.callbacks=[experiments/callbacks/samples_to_csv.py:SamplesToCsv]"
"""

from __future__ import annotations

import csv
from collections.abc import Iterable, Mapping, Sequence

import pyarrow as pa

from rlhf_suite.train.callbacks import Started

COLUMNS = ("prompt", "response", "reward")


class SamplesToCsv:
    def on_start(self, started: Started) -> None:
        self.file = started.folder / "samples.csv"
        rows = list(csv.reader(self.file.open())) if self.file.exists() else [["step", *COLUMNS]]
        kept = [row for row in rows if row[0] == "step" or int(row[0]) <= started.step]  # later ones are made again
        self.write(kept, "w")

    def on_step(self, step: int, metrics: Mapping[str, float], samples: pa.Table) -> None:
        self.write([[step, *row] for row in zip(*(samples[name].to_pylist() for name in COLUMNS), strict=True)], "a")

    def write(self, rows: Iterable[Sequence[object]], mode: str) -> None:
        with self.file.open(mode, newline="") as file:
            csv.writer(file).writerows(rows)
