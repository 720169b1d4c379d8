"""Trajectories to rewards: from a rule, a user's file or a reward model; a failure is never a silent zero."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from transformers import AutoConfig, PreTrainedTokenizerBase

from rlhf_suite.algo.shaping import clip_scores, normalize_scores
from rlhf_suite.config.reward import RewardConfig
from rlhf_suite.data.chat import Prompt
from rlhf_suite.data.trajectory import Trajectory, to_batch
from rlhf_suite.errors import RunError, UserError
from rlhf_suite.models.load import model_folder
from rlhf_suite.models.save import reward_stats
from rlhf_suite.rewards.base import RewardFailure, RewardRow, Scored
from rlhf_suite.rewards.pool import Rewarder
from rlhf_suite.rl.sharding import balanced_parts, reassemble_rows, shards
from rlhf_suite.train.workers import WorkerGroup


@dataclass(frozen=True)
class ScoredTrajectories:
    """The trajectories that have a reward, whole groups only, with display text. B trajectories."""

    trajectories: list[Trajectory]
    rewards: np.ndarray  # [B] what is trained on: standardised (reward.normalize_enable), then clipped to clip_range
    scores: np.ndarray  # [B] as the source gave them
    prompts: list[str]
    responses: list[str]
    labels: list[str]
    datasources: list[str]
    extra: list[dict[str, float]] = field(default_factory=list)


class Scorer:
    """Scores whole batches with the one source that `reward` names."""

    def __init__(
        self,
        config: RewardConfig,
        prompts: Sequence[Prompt],
        tokenizer: PreTrainedTokenizerBase,
        rewarder: Rewarder | None,
        reward_model: WorkerGroup | None,
    ) -> None:
        self.config, self.prompts, self.tokenizer = config, prompts, tokenizer
        self.rewarder, self.reward_model = rewarder, reward_model
        self.constants = normalization(config)

    def score(self, trajectories: list[Trajectory]) -> tuple[ScoredTrajectories, dict[str, float]]:
        """Rewards of a rollout. Failed samples end the run or drop their group, by reward.on_error."""
        rows = self.rows(trajectories)
        outcomes = self.outcomes(trajectories, rows)
        failures = {t.group: o for t, o in zip(trajectories, outcomes, strict=True) if isinstance(o, RewardFailure)}
        if failures and (self.config.on_error == "stop" or len(failures) == len({t.group for t in trajectories})):
            first = next(iter(failures.values()))
            raise RunError(
                f"the reward of {len(failures)} of {trajectories[-1].group + 1} groups failed "
                f"({first.kind}: {first.reason}); mend the reward, or set reward.on_error=drop to leave such groups out"
            )
        kept = [i for i, t in enumerate(trajectories) if t.group not in failures]
        scored = self.select(trajectories, rows, outcomes, kept)
        return scored, self.metrics(scored, len(failures))

    def rows(self, trajectories: Sequence[Trajectory]) -> list[RewardRow]:
        """The text a reward sees. Special tokens stay in the query, as a reward model would see them."""
        queries = self.tokenizer.batch_decode([t.ids for t in trajectories], skip_special_tokens=False)
        responses = self.tokenizer.batch_decode([t.response_ids for t in trajectories], skip_special_tokens=True)
        prompts = [self.prompts[t.prompt] for t in trajectories]
        return [
            RewardRow(query, prompt.text, response, prompt.label, prompt.datasource)
            for query, response, prompt in zip(queries, responses, prompts, strict=True)
        ]

    def outcomes(self, trajectories: Sequence[Trajectory], rows: list[RewardRow]) -> Sequence[Scored | RewardFailure]:
        if self.rewarder is not None:
            return self.rewarder.score(rows)
        assert self.reward_model is not None
        batch = to_batch(trajectories)
        parts = balanced_parts(batch, self.reward_model.world_size)
        scores = reassemble_rows(parts, self.reward_model.call_sharded("scores", shards(batch, parts)))
        return [Scored(score, score, {}) for score in scores.tolist()]

    def select(
        self,
        trajectories: Sequence[Trajectory],
        rows: Sequence[RewardRow],
        outcomes: Sequence[Scored | RewardFailure],
        kept: Sequence[int],
    ) -> ScoredTrajectories:
        chosen = [outcome for i in kept if isinstance(outcome := outcomes[i], Scored)]
        return ScoredTrajectories(
            [trajectories[i] for i in kept],
            self.shaped(np.array([s.reward for s in chosen], np.float32)),
            np.array([s.score for s in chosen], np.float32),
            [rows[i].prompt for i in kept],
            [rows[i].response for i in kept],
            [rows[i].label for i in kept],
            [rows[i].datasource for i in kept],
            [s.extra for s in chosen],
        )

    def shaped(self, rewards: np.ndarray) -> np.ndarray:
        """Rewards [B] of the source as the estimators see them."""
        result = torch.from_numpy(rewards)
        if self.constants is not None:
            result = normalize_scores(result, *self.constants)
        return clip_scores(result, self.config.clip_range).numpy()

    def metrics(self, scored: ScoredTrajectories, dropped: int) -> dict[str, float]:
        """Means over samples; the spread inside groups; every extra value over the samples that have it."""
        lengths = np.array([t.response_length for t in scored.trajectories])
        groups = np.array([t.group for t in scored.trajectories])
        truncated = np.array([t.truncated for t in scored.trajectories])
        result = {
            "train/reward": float(scored.rewards.mean()),
            "train/score": float(scored.scores.mean()),
            "train/response_length": float(lengths.mean()),
            "train/total_length": float(np.mean([len(t.ids) for t in scored.trajectories])),
            "train/truncated": float(truncated.mean()),
            "rollout/reward_std": float(scored.rewards.std()),
            "rollout/num_samples": float(len(lengths)),
            "rollout/dropped_groups": float(dropped),
        }
        spreads = [scored.rewards[groups == g].std(ddof=1) for g in np.unique(groups) if (groups == g).sum() > 1]
        if spreads:
            result["train/group_reward_std"] = float(np.mean(spreads))
        for name in sorted({name for extra in scored.extra for name in extra}):
            result[f"reward/{name}"] = float(np.mean([extra[name] for extra in scored.extra if name in extra]))
        return result


def normalization(config: RewardConfig) -> tuple[float, float] | None:
    """The mean and standard deviation of reward.normalize_enable, from the reward model's config.json; None: off.

    Raises:
        UserError: the model holds none, so that the scores would stay as they are without a word.
    """
    if not config.normalize_enable:
        return None
    assert config.model_name_or_path is not None
    folder = model_folder(config.model_name_or_path, "reward.model_name_or_path")
    stats = reward_stats(AutoConfig.from_pretrained(folder, trust_remote_code=False))
    if stats is None or stats[1] <= 0:
        found = "has no reward_mean and reward_std" if stats is None else f"has reward_std={stats[1]:g}"
        raise UserError(
            f"reward.normalize_enable=true, but config.json of reward.model_name_or_path={config.model_name_or_path} "
            f"{found}: write the mean and the standard deviation of its scores there, or leave the flag away"
        )
    return stats
