"""The sources of reward as one kind of function: trajectories with their text in, an outcome for each out."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from rlhf_suite.data.trajectory import Trajectory, to_batch
from rlhf_suite.rewards.base import Outcome, RewardRow, Scored
from rlhf_suite.rewards.sources import TextReward
from rlhf_suite.rl.sharding import balanced_parts, reassemble_rows, shards
from rlhf_suite.train.workers import WorkerGroup

Source = Callable[[Sequence[Trajectory], list[RewardRow]], Sequence[Outcome]]


def no_reward(trajectories: Sequence[Trajectory], rows: list[RewardRow]) -> Sequence[Outcome]:
    """Of a run that learns from a teacher alone."""
    return [Scored(0.0, 0.0)] * len(rows)


def text_source(reward: TextReward) -> Source:
    """A source that reads the text alone."""
    return lambda trajectories, rows: reward.score(rows)


def model_source(group: WorkerGroup) -> Source:
    """A reward model that reads the policy's own tokens."""

    def scores(trajectories: Sequence[Trajectory], rows: list[RewardRow]) -> Sequence[Outcome]:
        batch = to_batch(trajectories)
        parts = balanced_parts(batch, group.world_size)
        found = reassemble_rows(parts, group.call_sharded("scores", shards(batch, parts)))
        return [Scored(score, score) for score in found.tolist()]

    return scores
