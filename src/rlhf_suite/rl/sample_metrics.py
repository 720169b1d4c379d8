"""Metrics of the samples of a step: rewards, lengths, truncation, also by source of the prompts."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from rlhf_suite.data.trajectory import EpisodeRows, Trajectory, group_numbers
from rlhf_suite.rl.sample_table import number_column
from rlhf_suite.rl.samples import ScoredTrajectories

PASS = 0.5  # a sample passes when its score is above this


def sample_metrics(scored: ScoredTrajectories) -> dict[str, float]:
    """Return means over samples, the spread inside groups, every extra value over the samples that have it, and
    `train/<source>/` where there are several sources."""
    lengths = response_lengths(scored.trajectories)
    total_lengths = episode_sums(scored.trajectories, [len(t.ids) for t in scored.trajectories])
    scored = scored.episodes()
    groups = group_numbers(scored.trajectories)
    result = {
        **means(scored, lengths, np.ones(len(groups), bool), "train"),
        "train/total_length": float(np.mean(total_lengths)),
        "rollout/num_samples": float(len(groups)),
    }
    if len(groups) > 1:
        result["rollout/reward_std"] = float(scored.rewards.std())
    if spreads := [rewards.std(ddof=1) for rewards in by_group(scored.rewards, groups) if len(rewards) > 1]:
        result["train/group_reward_std"] = float(np.mean(spreads))
    for source, chosen in by_source(scored).items():
        result |= means(scored, lengths, chosen, f"train/{source}")
    for name in sorted({name for extra in scored.extra for name in extra}):
        result[number_column(name)] = float(np.mean([extra[name] for extra in scored.extra if name in extra]))
    return result


def response_lengths(trajectories: Sequence[Trajectory]) -> np.ndarray:
    """Return how many tokens the model wrote in each episode, [E]."""
    return episode_sums(trajectories, [t.response_length for t in trajectories])


def episode_sums(trajectories: Sequence[Trajectory], values: Sequence[int]) -> np.ndarray:
    """Return the sum of `values` [B] over the ledgers of each episode, [E]."""
    return np.add.reduceat(values, EpisodeRows.of(trajectories).starts)


def by_group(values: np.ndarray, groups: np.ndarray) -> list[np.ndarray]:
    """Return the values [B] of each group, in the order of the groups' numbers and inside a group in their own."""
    order = np.argsort(groups, kind="stable")
    starts = np.unique(groups[order], return_index=True)[1]
    return np.split(values[order], starts[1:])


def by_source(scored: ScoredTrajectories) -> dict[str, np.ndarray]:
    """Return which samples [B] bool belong to each source of prompts, where the run has several, to each value of the
    column `datasource`, where these samples have several, and to each role, where their episodes have roles. Samples
    without a value of the column belong to none of its values."""
    datasources, sources = scored.datasources, [t.prompt.source for t in scored.trajectories]
    roles = [t.role for t in scored.trajectories]
    columns = [datasources] if len(set(datasources)) > 1 else []
    if any(sources):
        columns.append(sources)
    result = {name: np.array(names) == name for names in columns for name in sorted(set(names)) if name}
    return result | {role: np.array(roles) == role for role in sorted(set(roles)) if role}


def means(scored: ScoredTrajectories, lengths: np.ndarray, chosen: np.ndarray, prefix: str) -> dict[str, float]:
    """Return means over the chosen samples [B] bool: shaped reward, score, share that passes, length and share that was
    cut off."""
    truncated = np.array([t.truncated for t in scored.trajectories])
    return {
        f"{prefix}/reward": float(scored.rewards[chosen].mean()),
        f"{prefix}/score": float(scored.scores[chosen].mean()),
        f"{prefix}/pass_rate": float((scored.scores[chosen] > PASS).mean()),
        f"{prefix}/response_length": float(lengths[chosen].mean()),
        f"{prefix}/truncated": float(truncated[chosen].mean()),
    }
