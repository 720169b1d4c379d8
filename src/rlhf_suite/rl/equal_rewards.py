"""Says when rewards have told no answers apart for several steps: the policy then learns nothing from them."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from rlhf_suite.config.algo import AlgoConfig
from rlhf_suite.rl.samples import ScoredTrajectories

STEPS = 3  # in a row, after which it is said


class EqualRewards:
    """Looks at the shaped rewards of every step, and says once that they do not differ."""

    def __init__(self, config: AlgoConfig, notice: Callable[[str], None]) -> None:
        self.by_group = config.advantage.needs("groups")
        self.notice, self.steps, self.said = notice, 0, False

    def look(self, scored: ScoredTrajectories) -> None:
        """Take note of the rewards of a step."""
        groups = np.array([t.group for t in scored.trajectories]) if self.by_group else np.zeros(len(scored.rewards))
        spreads = [np.ptp(scored.rewards[groups == group]) for group in np.unique(groups)]
        self.steps = self.steps + 1 if max(spreads, default=0.0) == 0 else 0
        if self.steps == STEPS and not self.said:
            self.said = True
            whose = "all answers to the same prompt" if self.by_group else "all answers"
            self.notice(
                f"In each of the last {STEPS} steps {whose} had the same reward (mean {scored.rewards.mean():g}), so "
                "the rewards teach the policy nothing. Look at the answers in the rollouts folder, at the reward and "
                "at data.label_key; the prompts may also be far too hard or far too easy"
            )
