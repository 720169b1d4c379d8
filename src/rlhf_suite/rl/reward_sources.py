"""The sources of reward as one kind of function: trajectories with their text in, an outcome for each out."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from rlhf_suite.data.batch import collate
from rlhf_suite.data.solutions import SolutionEncoder
from rlhf_suite.data.trajectory import Trajectory, to_batch
from rlhf_suite.models.process import StepScores, scores_of
from rlhf_suite.rewards.base import Outcome, RewardFailure, RewardRow, Scored
from rlhf_suite.rewards.sources import TextReward
from rlhf_suite.rl.sharding import balanced_parts, reassemble, reassemble_rows, shards
from rlhf_suite.train.workers import WorkerGroup

Source = Callable[[Sequence[Trajectory], list[RewardRow]], Sequence[Outcome]]


def no_reward(trajectories: Sequence[Trajectory], rows: list[RewardRow]) -> Sequence[Outcome]:
    """Of a run that learns from a teacher alone."""
    return [Scored(0.0, 0.0)] * len(rows)


def text_source(reward: TextReward) -> Source:
    """A source that reads the text alone."""
    return lambda trajectories, rows: reward.score(rows)


def process_source(group: WorkerGroup, encoder: SolutionEncoder, aggregate: str) -> Source:
    """A process reward model. It reads the text of prompt and response with its own tokenizer, so that policies of
    any vocabulary can be scored; the trajectory's tokens are not touched."""

    def scores(trajectories: Sequence[Trajectory], rows: list[RewardRow]) -> Sequence[Outcome]:
        examples = [encoder.encode(row.prompt, row.response, is_rendered=True) for row in rows]
        batch = collate(examples)
        parts = balanced_parts(batch, group.world_size)
        found = group.call_sharded("probabilities", shards(batch, parts), encoder.columns)
        steps = scores_of(batch, reassemble(batch, parts, found), [example.truncated for example in examples])
        return [outcome(each, aggregate, encoder.form.max_len) for each in steps]

    return scores


def outcome(steps: StepScores, aggregate: str, max_len: int) -> Outcome:
    """The reward of a response, with the numbers of its steps; a response that does not fit has none."""
    if steps.truncated:
        reason = f"a response is longer than the {max_len} tokens that the process reward model was trained with"
        return RewardFailure(reason, "error")
    reward = steps.aggregated(aggregate)
    extra = {f"step_{name}": steps.aggregated(name) for name in ("min", "mean")}
    return Scored(reward, reward, extra | {"num_steps": float(len(steps.scores))})


def model_source(group: WorkerGroup) -> Source:
    """A reward model that reads the policy's own tokens."""

    def scores(trajectories: Sequence[Trajectory], rows: list[RewardRow]) -> Sequence[Outcome]:
        batch = to_batch(trajectories)
        parts = balanced_parts(batch, group.world_size)
        found = reassemble_rows(parts, group.call_sharded("scores", shards(batch, parts)))
        return [Scored(score, score) for score in found.tolist()]

    return scores
