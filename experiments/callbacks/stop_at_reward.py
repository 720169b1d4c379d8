"""Ends a run when the mean of a metric over some steps has reached a goal, and saves every step that is a new best:

python run.py task=ppo "train.callbacks=[experiments/callbacks/stop_at_reward.py:StopAtReward]"
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import rlhf_suite as rs

METRIC, GOAL, STEPS = "train/reward", 0.9, 3


class StopAtReward:
    def __init__(self) -> None:
        self.last = list[float]()
        self.best = float("-inf")

    def on_step(self, step: int, metrics: Mapping[str, float], samples: object) -> rs.Stop | rs.Save | None:
        self.last = [*self.last, metrics[METRIC]][-STEPS:]
        mean = sum(self.last) / len(self.last)
        if len(self.last) == STEPS and mean >= GOAL:
            return rs.Stop(f"{METRIC} is {mean:.3f} over {STEPS} steps")
        if metrics[METRIC] <= self.best:
            return None
        self.best = metrics[METRIC]
        return rs.Save()

    def state(self) -> dict[str, Any]:
        return {"last": self.last, "best": self.best}

    def load(self, state: Mapping[str, Any]) -> None:
        self.last, self.best = state["last"], state["best"]
