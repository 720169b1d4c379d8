"""Reward shaping: the clip and penalties, and greedy baselines beside the samples that they are for.

What a penalty takes from a reward is logged like a part of it: `overlong_penalty` and `stop_properly_penalty`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import torch

from rlhf_suite.algo.scores import clip_scores, overlong_penalty, stop_properly
from rlhf_suite.config.declarations.reward import RewardConfig
from rlhf_suite.data.trajectory import ENVIRONMENT, PROMPT, EpisodeRows, Trajectory
from rlhf_suite.rl.samples import ScoredTrajectories


class Shaper:
    """Shapes rewards by the flags of `reward`. `max_new_tokens`: how many tokens may follow a prompt of so many."""

    def __init__(self, config: RewardConfig, max_new_tokens: Callable[[int], int]) -> None:
        self.config, self.max_new_tokens = config, max_new_tokens

    def shape(self, scored: ScoredTrajectories) -> ScoredTrajectories:
        """Return the samples that are trained on, with shaped rewards and, where there are greedy samples, `greedy`."""
        rewards, penalties = self.rewards(scored)
        logged = [dict(zip(penalties, row, strict=True)) for row in zip(*penalties.values(), strict=True)]
        extra = [numbers | more for numbers, more in zip(scored.extra, logged, strict=True)] if logged else scored.extra
        return without_greedy(replace(scored, rewards=rewards, extra=extra))

    def rewards(self, scored: ScoredTrajectories) -> tuple[np.ndarray, dict[str, list[float]]]:
        """Return the rewards [B] after clip, overlong penalty and stop-properly penalty, and what each penalty changed;
        with reward.clip_shaped the clip comes last. Of an episode with several ledgers the longest one counts for the
        overlong penalty, and the last one says whether it was truncated."""
        config, trajectories, rows = self.config, scored.trajectories, EpisodeRows.of(scored.trajectories)
        result, changes = torch.from_numpy(scored.rewards), {}
        if not config.clip_shaped:
            result = clip_scores(result, config.clip_range)
        if config.overlong_buffer_len is not None:
            lengths = torch.tensor([t.response_length for t in trajectories])
            longest = torch.tensor([self.longest(t) for t in trajectories])
            factor = config.overlong_penalty_factor
            penalties = overlong_penalty(lengths, longest, config.overlong_buffer_len, factor).numpy()
            penalty = torch.from_numpy(np.maximum.reduceat(penalties, rows.starts)[rows.numbers])
            result, changes["overlong_penalty"] = result - penalty, (0 - penalty).tolist()
        if config.stop_properly_penalty_coef is not None:
            truncated = torch.tensor([trajectories[last].truncated for last in rows.lasts])[rows.numbers]
            before, result = result, stop_properly(result, truncated, config.stop_properly_penalty_coef)
            changes["stop_properly_penalty"] = (result - before).tolist()
        if config.clip_shaped:
            result = clip_scores(result, config.clip_range)
        return result.float().numpy(), changes

    def longest(self, trajectory: Trajectory) -> int:
        """Return the most tokens that the model could have written: what environments wrote took room from it."""
        others = int((trajectory.owner == ENVIRONMENT).sum())
        return self.max_new_tokens(int((trajectory.owner == PROMPT).sum())) - others


def without_greedy(scored: ScoredTrajectories) -> ScoredTrajectories:
    """Return the sampled responses, each with the reward of the greedy one of its group, if there is one."""
    pairs = zip(scored.trajectories, scored.rewards, strict=True)
    baselines = {(t.group, t.role): reward for t, reward in pairs if t.greedy}
    if not baselines:
        return scored
    kept = scored.take([i for i, t in enumerate(scored.trajectories) if not t.greedy])
    return replace(kept, greedy=np.array([baselines[t.group, t.role] for t in kept.trajectories], np.float32))
