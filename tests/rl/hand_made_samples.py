"""Scored ledgers of a few tokens."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from given import prompt
from rlhf_suite.data.ending import Ending
from rlhf_suite.data.trajectory import Trajectory
from rlhf_suite.rl.samples import ScoredTrajectories


def trajectory(index=0, group=0, sample=0, own=3, *, finish="stop", greedy=False, source="a") -> Trajectory:
    """A prompt of 2 tokens, `own` of the model with one of an environment in between."""
    result = replace(Trajectory.start(prompt(index, datasource=source), group, sample), greedy=greedy)
    result.append_model(np.arange(own - 1), np.full(own - 1, -0.1, np.float32), 4)
    result.append_environment([7])
    result.append_model(np.array([9]), np.array([-0.3], np.float32), 4)
    result.ending = Ending.of_response(finish)
    return result


def scored(trajectories, rewards) -> ScoredTrajectories:
    texts = [f"{t.prompt.index}.{t.sample}" for t in trajectories]
    values = np.array(rewards, np.float32)
    return ScoredTrajectories(
        trajectories,
        values,
        values,
        texts,
        texts,
        [{}] * len(texts),
    )
