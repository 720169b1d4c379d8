"""The sources of reward of a run asked about trajectories: text goes to most of them, tokens to a reward model."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from rlhf_suite.algo.scores import normalize_scores
from rlhf_suite.config.reward import NamedSourceConfig
from rlhf_suite.data.batch import Example, TokenBatch, collate
from rlhf_suite.data.steps import SolutionEncoder
from rlhf_suite.data.trajectory import Trajectory, to_batch
from rlhf_suite.models.process_reward_model import StepScores, split_step_scores
from rlhf_suite.rewards.base import Outcome, RewardFailure, RewardRow, Scored
from rlhf_suite.rewards.sources import Rewards
from rlhf_suite.rl.model_groups import ProcessRewardGroup, RewardGroup

ModelSource = Callable[[Sequence[Trajectory], Sequence[RewardRow]], list[Outcome]]


class TrajectoryRewards:
    """`rewards` (None: it learns from a teacher alone) with the models that run beside the policy."""

    def __init__(
        self, rewards: Rewards | None, model: ModelSource | None = None, process: ModelSource | None = None
    ) -> None:
        self.rewards, self.model, self.process = rewards, model, process

    @property
    def is_empty(self) -> bool:
        """Whether nothing scores: every response then has reward 0."""
        return self.rewards is None

    def score(
        self, trajectories: Sequence[Trajectory], rows: Sequence[RewardRow]
    ) -> tuple[list[Outcome], dict[str, float]]:
        """An outcome per trajectory, and metrics of each source."""
        if self.rewards is None:
            return [Scored(0.0, 0.0)] * len(rows), {}

        def by_model(source: NamedSourceConfig, chosen: Sequence[int]) -> list[Outcome]:
            scores = self.process if source.process else self.model
            assert scores is not None
            return scores([trajectories[i] for i in chosen], [rows[i] for i in chosen])

        return self.rewards.score(rows, by_model)


def model_source(group: RewardGroup, constants: tuple[float, float] | None) -> ModelSource:
    """A reward model that reads the policy's own tokens. The score is what it says, the reward is that standardised by
    `constants` (mean and deviation)."""

    def scores(trajectories: Sequence[Trajectory], rows: Sequence[RewardRow]) -> list[Outcome]:
        found = group.scores(to_batch(trajectories)).result()
        rewards = found if constants is None else normalize_scores(found, *constants)
        return [Scored(reward, score) for reward, score in zip(rewards.tolist(), found.tolist(), strict=True)]

    return scores


def process_source(group: ProcessRewardGroup, encoder: SolutionEncoder, aggregate: str) -> ModelSource:
    """A process reward model. It reads the text of prompt and response with its own tokenizer, so that policies of
    any vocabulary can be scored; the trajectory's tokens are not touched."""

    def scores(trajectories: Sequence[Trajectory], rows: Sequence[RewardRow]) -> list[Outcome]:
        examples = [encoder.encode(row.prompt, row.response, is_rendered=True) for row in rows]
        return [outcome(each, aggregate, encoder.form.max_len) for each in step_scores(group, encoder, examples)]

    return scores


def step_scores(group: ProcessRewardGroup, encoder: SolutionEncoder, examples: Sequence[Example]) -> list[StepScores]:
    """P(good) of the steps of each solution, by the process reward model of `group`."""
    batch = collate(examples, TokenBatch)
    found = group.probabilities(batch, encoder.columns).result()
    return split_step_scores(batch, found, [example.truncated for example in examples])


def outcome(steps: StepScores, aggregate: str, max_len: int) -> Outcome:
    """The reward of a response, with the numbers of its steps; a response that does not fit has none."""
    if steps.truncated:
        reason = f"a response is longer than the {max_len} tokens that the process reward model was trained with"
        return RewardFailure(reason, "error")
    reward = steps.aggregated(aggregate)
    extra = {f"step_{name}": steps.aggregated(name) for name in ("min", "mean")}
    return Scored(reward, reward, extra | {"num_steps": float(len(steps.scores))})
