"""Callbacks of a run, which write each call into the folder of the run."""

from __future__ import annotations

import json
from pathlib import Path

import rlhf_suite as rs

FAILS_AT = 3


def note(folder, *call):
    with (Path(folder) / "calls.jsonl").open("a") as file:
        file.write(json.dumps(call) + "\n")


class Watch:
    def __init__(self):
        self.seen = 0

    def on_start(self, started):
        self.folder = started.folder
        note(self.folder, "start", started.step, started.total_steps)

    def on_step(self, step, metrics, samples):
        self.seen += 1
        rows = None if samples is None else samples.num_rows
        note(self.folder, "step", step, self.seen, rows, metrics["train/tokens"] > 0)
        if step == 2:
            return [rs.Save(), rs.Evaluate()]
        return rs.Stop("enough") if step == 4 else None

    def on_evaluation(self, step, metrics):
        note(self.folder, "evaluation", step)

    def on_checkpoint(self, folder):
        note(self.folder, "checkpoint", folder.name)

    def on_end(self, status):
        note(self.folder, "end", status)

    def state(self):
        return {"seen": self.seen}

    def load(self, state):
        self.seen = state["seen"]


def fails_once(step, metrics, samples):
    mark = Path(__file__).with_name("watched.mark")
    if step == FAILS_AT and mark.exists():
        mark.unlink()
        raise ValueError("not yet")
