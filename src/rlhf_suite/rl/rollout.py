"""The samples of a step: sample, score, and with dynamic filtering go on until enough groups are worth training on."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from rlhf_suite.algo.filters import teaches
from rlhf_suite.config.runs import PPORun
from rlhf_suite.data.sampler import BatchOrder
from rlhf_suite.errors import RunError
from rlhf_suite.rl.equal_rewards import EqualRewards
from rlhf_suite.rl.sample_metrics import sample_metrics
from rlhf_suite.rl.samples import ScoredTrajectories, joined, read_groups, write_groups
from rlhf_suite.rl.sampling import Collector
from rlhf_suite.rl.scoring import Scorer
from rlhf_suite.rl.shaping import Shaper
from rlhf_suite.tracking.journal import Journal

OF_REWARDS = ("reward", "score", "_std", "pass_rate")


class Gatherer:
    """Prompts to shaped samples.

    With `algo.dynamic_filtering_enable` a round samples the next `rollout.vllm_generate_batch_size` prompts; groups in
    which all answers are right, or all wrong, are left out. Accepted groups beyond what the step needs stay for the
    next steps, oldest first: none is dropped. They and the number of rounds are state.
    """

    def __init__(  # noqa: PLR0913, PLR0917 - one part of the story each
        self,
        config: PPORun,
        order: BatchOrder,
        collector: Collector,
        scorer: Scorer,
        shaper: Shaper,
        journal: Journal,
        sources: Sequence[str] = (),
    ) -> None:
        self.sources = sources  # that of each prompt; empty: there is one
        self.equal_rewards = EqualRewards(config.algo, journal.warn)
        self.config, self.order, self.journal = config, order, journal
        self.collector, self.scorer, self.shaper = collector, scorer, shaper
        size = config.rollout.vllm_generate_batch_size or config.rollout.batch_size
        self.rounds_order = BatchOrder(order.num_rows, size, order.seed)
        self.rounds = 0  # of sampling, over the whole run
        self.held: list[ScoredTrajectories] = []  # accepted groups that no step has taken yet

    def gather(self, step: int) -> tuple[ScoredTrajectories, dict[str, float]]:
        """The samples of a step (0-based), whole groups."""
        if self.config.algo.dynamic_filtering_enable:
            scored, metrics = self.filtered()
        else:
            scored, metrics = self.sample(self.order.indices(step), step)
        shaped = self.shaper.shape(scored)
        metrics |= sample_metrics(shaped, self.sources)
        if self.config.algo.advantage.needs("rewards"):
            self.equal_rewards.look(shaped)
        if self.scorer.rewards.is_empty:
            metrics = {name: value for name, value in metrics.items() if not is_of_rewards(name)}
        return shaped, metrics

    def sample(self, indices: Sequence[int], stream: int) -> tuple[ScoredTrajectories, dict[str, float]]:
        """Every prompt of `indices`, sampled and scored; `stream` sets the random numbers."""
        with self.journal.phase("generation"):
            trajectories = self.collector.collect(indices, stream)
        with self.journal.phase("reward"):
            return self.scorer.score(trajectories)

    def filtered(self) -> tuple[ScoredTrajectories, dict[str, float]]:
        """Rounds until `rollout.batch_size` groups are there, or algo.dynamic_filtering_max_rounds have passed."""
        algo, wanted = self.config.algo, self.config.rollout.batch_size
        counts: Counter[str] = Counter()
        sampled = accepted = rounds = 0
        while len(self.held) < wanted and rounds < algo.dynamic_filtering_max_rounds:
            if rounds:
                self.collector.wake()
            scored, found = self.sample(self.rounds_order.indices(self.rounds), self.rounds)
            fresh = scored.by_group()
            kept = [group for group in fresh if self.is_accepted(group)]
            self.held += kept
            counts.update(found)
            sampled, accepted = sampled + len(fresh), accepted + len(kept)
            rounds, self.rounds = rounds + 1, self.rounds + 1
        if rounds == 0:
            self.collector.rest()
        if not self.held:
            raise RunError(
                f"{rounds} rounds of {self.rounds_order.batch_size} prompts gave no group with a mean score inside "
                f"algo.dynamic_filtering_range={algo.dynamic_filtering_range} and scores that differ: the prompts are "
                "too hard or too easy. Widen the range, raise rollout.n_samples_per_prompt, or take other prompts"
            )
        taken, self.held = self.held[:wanted], self.held[wanted:]
        metrics = {"rollout/filter_rounds": float(rounds), "rollout/held_groups": float(len(self.held))}
        if sampled:
            metrics["rollout/filter_pass_rate"] = accepted / sampled
        return joined(taken), dict(counts) | metrics

    def is_accepted(self, group: ScoredTrajectories) -> bool:
        """By the scores of the samples that would be trained on."""
        algo = self.config.algo
        scores = [float(s) for s, t in zip(group.scores, group.trajectories, strict=True) if not t.greedy]
        low, high = algo.dynamic_filtering_range
        return teaches(scores, low, high, algo.dynamic_filtering_min_std)

    def save(self, folder: Path) -> None:
        """The state, into a checkpoint's folder."""
        (folder / "rounds.json").write_text(json.dumps(self.rounds))
        write_groups(folder, self.held)

    def load(self, folder: Path) -> None:
        """The inverse of `save`."""
        self.rounds = json.loads((folder / "rounds.json").read_text())
        self.held = read_groups(folder)


def is_of_rewards(name: str) -> bool:
    """Whether a metric says nothing where nothing scores."""
    return name.startswith("reward/") or name.endswith(OF_REWARDS)
