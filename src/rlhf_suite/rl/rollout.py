"""How groups become a rollout, between the engines and a step: they are scored, filtered, and shaped together."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from pathlib import Path

import numpy as np

from rlhf_suite.algo.scores import are_equal
from rlhf_suite.config.declarations.algo import AlgoConfig
from rlhf_suite.data.trajectory import Trajectory, group_numbers
from rlhf_suite.rl.filtering import LEFT_OUT, Filters
from rlhf_suite.rl.sample_metrics import sample_metrics
from rlhf_suite.rl.samples import ScoredTrajectories, join_groups
from rlhf_suite.rl.scoring import FAILURES, Scorer, Scores
from rlhf_suite.rl.shaping import Shaper
from rlhf_suite.tracking.journal import Journal

Rollout = tuple[ScoredTrajectories, dict[str, float]]  # shaped samples and metrics
OF_REWARDS = ("reward", "score", "_std", "pass_rate")
EQUAL_STEPS = 3  # in a row, after which the user is told


class RolloutBuilder:
    """Scores and filters groups, and shapes the groups of a step."""

    def __init__(self, filters: Filters, scorer: Scorer, shaper: Shaper, journal: Journal) -> None:
        self.filters, self.scorer, self.shaper, self.journal = filters, scorer, shaper, journal
        self.equal_rewards = EqualRewards(filters.algo, journal.warn)

    def score(self, groups: Sequence[list[Trajectory]]) -> Scores:
        """Score groups, all of them in one call, and let the filters look at each."""
        for trajectory in chain.from_iterable(groups):
            assert (np.diff(trajectory.version[trajectory.model_mask]) >= 0).all(), "versions fall in a ledger"
        with self.journal.background("reward", "rewards"):
            scores = self.scorer.score(groups)
        result, counts = dict(scores.groups), Counter(scores.counts)
        for number, scored in sorted(scores.groups.items()):
            objection = None if scored.samples is None else self.filters.objection(scored.samples)
            if objection is not None:
                result[number] = replace(scored, objection=objection.reason)
                counts.update([objection.metric] if objection.metric is not None else [])
        return Scores(result, counts)

    def shape(self, groups: Sequence[ScoredTrajectories], metrics: Mapping[str, float]) -> Rollout:
        """Shape the rewards of the groups of a step, and measure their samples."""
        scored = join_groups(groups)
        shaped = self.shaper.shape(scored)
        result = dict(metrics) | sample_metrics(shaped)
        if self.filters.algo.advantage.needs("rewards"):
            self.equal_rewards.observe(shaped.episodes())
        if self.scorer.rewards is None and not any(t.reward is not None for t in scored.trajectories):
            result = {name: value for name, value in result.items() if not is_of_rewards(name)}
        return shaped, result

    def explain_empty_step(self, step: int, rounds: int, counts: Mapping[str, float]) -> str:
        """Return why a step (0-based) has no group to train on, after so many rounds of candidates."""
        algo, problem = self.filters.algo, f"{rounds} rounds of prompts gave no group"
        if not algo.filters:  # all of them have failed, and others of their round have not
            said = f"no group of step {step + 1} has a reward (logs/{FAILURES} has the reasons)"
            return f"{said}. Repair the reward, and continue the run"
        if algo.group_filter is None:
            return (
                f"{problem} with a mean score inside algo.dynamic_filtering_range={algo.dynamic_filtering_range} and "
                "scores that differ: the prompts are too hard or too easy. Widen the range, raise "
                "rollout.n_samples_per_prompt, or take other prompts"
            )
        reasons = [f"{name.removeprefix(LEFT_OUT)}: {n:g}" for name, n in counts.items() if name.startswith(LEFT_OUT)]
        listed = ", ".join(reasons) or "dynamic filtering left out all of them"
        said = f"algo.group_filter={algo.group_filter} accepts ({listed})"
        return f"{problem} that {said}. Change it, or take other prompts"

    def explain_rejections(self, count: int, file: Path) -> str:
        """Return why a stream, of which `count` groups were rejected one after the other, does not go on."""
        return (
            f"{count} groups were rejected since the last step, too many for a batch (the reasons are in {file}). "
            "Widen algo.dynamic_filtering_range or change algo.group_filter, raise rollout.n_samples_per_prompt, or "
            "take other prompts"
        )


def is_of_rewards(name: str) -> bool:
    """Return whether a metric says nothing where nothing scores."""
    return name.startswith("reward/") or name.endswith(OF_REWARDS)


class EqualRewards:
    """Tells the user once when the rewards of several steps in a row do not differ: the policy learns nothing then."""

    def __init__(self, config: AlgoConfig, notice: Callable[[str], None]) -> None:
        self.by_group, self.parts = config.advantage.needs("groups"), config.advantage.parts
        self.notice, self.steps, self.is_reported = notice, 0, False

    def observe(self, scored: ScoredTrajectories) -> None:
        """Take note of the rewards of a step."""
        groups = group_numbers(scored.trajectories) if self.by_group else np.zeros(len(scored.rewards))
        parts = [np.array([numbers.get(name, 0.0) for numbers in scored.extra]) for name in self.parts]
        members = [groups == group for group in np.unique(groups)]
        is_same = all(are_equal(part[rows].tolist()) for part in parts or [scored.rewards] for rows in members)
        self.steps = self.steps + 1 if is_same else 0
        if self.steps == EQUAL_STEPS and not self.is_reported:
            self.is_reported = True
            whose = "all answers to the same prompt" if self.by_group else "all answers"
            self.notice(
                f"In each of the last {EQUAL_STEPS} steps {whose} had the same reward (mean "
                f"{scored.rewards.mean():g}), so the rewards teach the policy nothing. Look at the answers in the "
                "rollouts folder, at the reward and at data.label_key; the prompts may also be far too hard or far "
                "too easy"
            )
