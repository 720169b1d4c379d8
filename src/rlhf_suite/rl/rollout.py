"""The samples of a step: sample, score, and with filters go on until enough groups are worth training on."""

from __future__ import annotations

import json
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np

from rlhf_suite.algo.scores import are_equal
from rlhf_suite.background import Ended, Line
from rlhf_suite.config.algo import AlgoConfig
from rlhf_suite.config.rollout import RolloutConfig
from rlhf_suite.data.sampler import BatchOrder
from rlhf_suite.data.text_encoders import Prompt
from rlhf_suite.data.trajectory import Trajectory
from rlhf_suite.errors import RunError
from rlhf_suite.rl.filtering import LEFT_OUT, Filters, History, Objection
from rlhf_suite.rl.sample_metrics import sample_metrics
from rlhf_suite.rl.sample_table import has_samples, read_samples, write_samples
from rlhf_suite.rl.samples import ScoredTrajectories, joined
from rlhf_suite.rl.sampling import Sampler
from rlhf_suite.rl.scoring import Scorer, place_of
from rlhf_suite.rl.shaping import Shaper
from rlhf_suite.tracking.journal import Journal
from rlhf_suite.waits import result

OF_REWARDS = ("reward", "score", "_std", "pass_rate")
Scored = tuple[ScoredTrajectories, dict[str, float]]  # samples, and metrics
EQUAL_STEPS = 3  # in a row, after which the user is told


@dataclass
class BuilderState:
    """What filters carry from one step to the next."""

    rounds: int = 0  # of sampling, over the whole run
    waiting: list[ScoredTrajectories] = field(default_factory=list)  # accepted groups that no step has taken yet
    history: History = field(default_factory=History)  # of the groups so far, for a filter of prompts

    def copy(self) -> BuilderState:
        """Return a state that does not change with this one."""
        return BuilderState(self.rounds, [*self.waiting], self.history.copy())

    def save(self, folder: Path) -> None:
        """Write the state into the folder of a checkpoint."""
        (folder / "rounds.json").write_text(json.dumps(self.rounds))
        self.history.save(folder)
        if self.waiting:
            write_samples(folder, joined(self.waiting))

    @classmethod
    def load(cls, folder: Path) -> BuilderState:
        """Read what `save` wrote."""
        waiting = read_samples(folder).by_group() if has_samples(folder) else []
        return cls(json.loads((folder / "rounds.json").read_text()), waiting, History.load(folder))


class RolloutBuilder:
    """Turns prompts into the shaped samples of a step.

    With filters (`filtering.py`) a round samples the next `rollout.vllm_generate_batch_size` prompts, or those of them
    that the filter of prompts takes; groups that a filter objects to are left out. Accepted groups beyond what the step
    needs stay for the next steps, oldest first: none is dropped. They and the number of rounds are `state`.
    """

    def __init__(  # noqa: PLR0913, PLR0917 - one part of the story each
        self,
        filters: Filters,
        config: RolloutConfig,
        order: BatchOrder,
        sampler: Sampler,
        scorer: Scorer,
        shaper: Shaper,
        journal: Journal,
        prompts: Sequence[Prompt],
        *,
        in_background: bool = False,
    ) -> None:
        self.prompts = prompts  # that the run trains on
        self.filters, self.algo, self.config, self.order = filters, filters.algo, config, order
        self.equal_rewards = EqualRewards(self.algo, journal.warn)
        self.phase = journal.background if in_background else journal.phase
        self.background, self.counted, self.in_background = journal.background, journal.counted, in_background
        self.wait = journal.phase  # of the driver, for rollouts that are made in the background
        self.sampler, self.scorer, self.shaper = sampler, scorer, shaper
        size = config.vllm_generate_batch_size or config.batch_size
        self.rounds_order = BatchOrder(order.num_rows, size, order.seed)
        self.state = BuilderState()

    def build(self, step: int) -> tuple[ScoredTrajectories, dict[str, float]]:
        """Return the samples of a step (0-based), whole groups."""
        if self.algo.filters:
            scored, metrics = self.filtered()
        else:
            scored, metrics = self.sample(self.order.indices(step), step)
        return self.finish(scored, metrics)

    def finish(
        self, scored: ScoredTrajectories, metrics: dict[str, float]
    ) -> tuple[ScoredTrajectories, dict[str, float]]:
        """Shape the rewards of the samples of a step, and measure them."""
        shaped = self.shaper.shape(scored)
        metrics |= sample_metrics(shaped)
        if self.algo.advantage.needs("rewards"):
            self.equal_rewards.observe(shaped.episodes())
        if self.scorer.rewards is None and not any(t.reward is not None for t in scored.trajectories):
            metrics = {name: value for name, value in metrics.items() if not is_of_rewards(name)}
        return shaped, metrics

    def sample(self, indices: Sequence[int], stream: int) -> tuple[ScoredTrajectories, dict[str, float]]:
        """Sample and score every prompt of `indices`; `stream` sets the random numbers.

        Groups that are complete are scored while the engines write the others, those that wait together in one call.
        A reward that fails ends this at once, whatever the engines write.
        """
        waiting: deque[list[Trajectory]] = deque()
        score, ended = partial(self.score_waiting, waiting), Ended[Any](f"the responses to {len(indices)} prompts")
        with Line[Scored | None]("rewards") as thread:
            parts, samples = [], 0
            with self.phase("generation", None):
                groups = self.sampler.sample_rollout([self.prompts[i] for i in indices], stream, ended)
                for group in groups if self.in_background else self.counted(groups, len(indices), "prompts"):
                    waiting.append(group)
                    samples += sum(t.fork == 0 for t in group)
                    if self.scorer.reads_text_alone:
                        parts.append(thread.start(score))
                        ended.watch(parts[-1])
            parts.append(thread.start(score))
            with self.phase("waiting_for_reward", None):
                found = [result(each, "the rewards of a rollout", "rewards") for each in parts]
        return self.scorer.together([part for part in found if part is not None], samples)

    def score_waiting(self, waiting: deque[list[Trajectory]]) -> Scored | None:
        """Score the groups that wait at this moment, if there are any, and remove them."""
        groups = [waiting.popleft() for _ in range(len(waiting))]
        if not groups:
            return None
        samples = sorted(chain.from_iterable(groups), key=place_of)
        with self.background("reward", "rewards"):
            return self.scorer.score(samples, is_part=True)

    def filtered(self) -> tuple[ScoredTrajectories, dict[str, float]]:
        """Sample rounds until there are `rollout.batch_size` groups, or after algo.dynamic_filtering_max_rounds."""
        algo, wanted, state = self.algo, self.config.batch_size, self.state
        counts: Counter[str] = Counter()
        sampled = accepted = rounds = 0
        while len(state.waiting) < wanted and rounds < algo.dynamic_filtering_max_rounds:
            if rounds:
                self.sampler.wake()
            candidates = self.rounds_order.indices(state.rounds)
            chosen = [candidates[place] for place in self.chosen(candidates, state.rounds, counts)]
            scored, found = self.sample(chosen, state.rounds)
            fresh = scored.by_group()
            kept = [group for group in fresh if self.objection(group, counts) is None]
            state.waiting += kept
            counts.update(found)
            sampled, accepted = sampled + len(fresh), accepted + len(kept)
            rounds, state.rounds = rounds + 1, state.rounds + 1
        if rounds == 0:
            self.sampler.sleep()
        if not state.waiting:
            raise RunError(nothing_left(algo, rounds, self.rounds_order.batch_size, counts))
        taken, state.waiting = state.waiting[:wanted], state.waiting[wanted:]
        metrics = {"rollout/filter_rounds": float(rounds), "rollout/waiting_groups": float(len(state.waiting))}
        if sampled:
            metrics["rollout/filter_pass_rate"] = accepted / sampled
        return joined(taken), dict(counts) | metrics

    def chosen(self, indices: Sequence[int], number: int, counts: Counter[str]) -> list[int]:
        """Return the places of the candidates that are sampled, of the prompts `indices` of the round `number`, and
        count the others."""
        places = self.filters.chosen(indices, self.state.history, number)
        self.count_chosen(indices, places, counts)
        return places

    def count_chosen(self, indices: Sequence[int], places: Sequence[int], counts: Counter[str]) -> None:
        """Count the candidates that the filter of prompts did not choose."""
        if self.algo.prompt_filter is not None:
            counts["rollout/prompts_not_chosen"] += len(indices) - len(places)

    def objection(self, group: ScoredTrajectories, counts: Counter[str]) -> Objection | None:
        """Return why a group is not trained on, None for one that is; count it, and take note of its scores."""
        found = self.filters.objection(group)
        self.note(group, found, counts)
        return found

    def note(self, group: ScoredTrajectories, found: Objection | None, counts: Counter[str]) -> None:
        """Take note of a group's scores, and count what a filter objected to."""
        self.filters.observe(group, self.state.history)
        if found is not None and found.metric is not None:
            counts[found.metric] += 1


def nothing_left(algo: AlgoConfig, rounds: int, size: int, counts: Mapping[str, float]) -> str:
    """Return why a step has no group to train on."""
    what = f"{rounds} rounds of {size} prompts gave no group"
    if algo.group_filter is None:
        return (
            f"{what} with a mean score inside algo.dynamic_filtering_range={algo.dynamic_filtering_range} and scores "
            "that differ: the prompts are too hard or too easy. Widen the range, raise rollout.n_samples_per_prompt, "
            "or take other prompts"
        )
    reasons = [f"{name.removeprefix(LEFT_OUT)}: {n:g}" for name, n in counts.items() if name.startswith(LEFT_OUT)]
    listed = ", ".join(reasons) or "dynamic filtering left out all of them"
    return f"{what} that algo.group_filter={algo.group_filter} accepts ({listed}). Change it, or take other prompts"


def is_of_rewards(name: str) -> bool:
    """Return whether a metric says nothing where nothing scores."""
    return name.startswith("reward/") or name.endswith(OF_REWARDS)


class EqualRewards:
    """Tells the user once when the rewards of several steps in a row do not differ: the policy learns nothing then."""

    def __init__(self, config: AlgoConfig, notice: Callable[[str], None]) -> None:
        self.by_group = config.advantage.needs("groups")
        self.notice, self.steps, self.is_reported = notice, 0, False

    def observe(self, scored: ScoredTrajectories) -> None:
        """Take note of the rewards of a step."""
        groups = np.array([t.group for t in scored.trajectories]) if self.by_group else np.zeros(len(scored.rewards))
        is_same = all(are_equal(scored.rewards[groups == group].tolist()) for group in np.unique(groups))
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
