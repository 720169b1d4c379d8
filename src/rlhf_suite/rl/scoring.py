"""Scoring of trajectories. A failure is never a silent zero."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace

import numpy as np
from numpy.typing import NDArray
from transformers import PreTrainedTokenizerBase

from rlhf_suite.config.agent import AgentConfig
from rlhf_suite.config.reward import RewardConfig
from rlhf_suite.data.ending import Ending
from rlhf_suite.data.trajectory import ENVIRONMENT, EpisodeRows, Trajectory
from rlhf_suite.errors import RunError
from rlhf_suite.foreign_text import printable
from rlhf_suite.rewards.base import Outcome, RewardFailure, Sample, Scored
from rlhf_suite.rewards.sources import Rewards
from rlhf_suite.rl.samples import ScoredTrajectories
from rlhf_suite.tracking.journal import Journal

REWARD_LOG, FAILURES = "reward.log", "reward_failures.jsonl"  # in the run folder's logs
ENDED = "agent/ended/"  # begins the names of metrics that count episodes by their ending


class Scorer:
    """Scores trajectories. A sample that cannot be scored ends the run or leaves its group out, and is reported."""

    def __init__(
        self,
        config: RewardConfig,
        tokenizer: PreTrainedTokenizerBase,
        rewards: Rewards | None,
        journal: Journal,
        agent: AgentConfig | None = None,
    ) -> None:
        self.config, self.tokenizer, self.rewards, self.journal = config, tokenizer, rewards, journal
        self.on_failed_episode = agent.on_error if agent is not None else None  # None: as config.on_error
        self.adds = agent is not None and agent.add_reward
        self.has_turns = agent is not None and agent.has_turns
        self.has_told = False  # that the sources do not score all episodes

    @property
    def reads_text_alone(self) -> bool:
        """Whether every source reads text. A model would score other batches at other times, with other rounding, and
        may share its device with the engines."""
        return self.rewards is None or self.rewards.reads_text_alone

    def score(
        self, trajectories: list[Trajectory], is_part: bool = False
    ) -> tuple[ScoredTrajectories, dict[str, float]]:
        """Score trajectories, whole groups. Failed samples end the run or drop their group, by reward.on_error; those
        whose environment failed by agent.on_error, which may also give them a reward of 0.

        Of an episode with several ledgers the last one is scored, and its outcome is that of all of them.
        `is_part`: they are not all of a step, so the caller checks the share of failures (`check_error_rate`).
        """
        samples, rows = self.samples(trajectories), EpisodeRows.of(trajectories)
        episodes = rows.parts(trajectories)
        scored = [
            replace(samples[last], turns=self.turns(ledgers))
            for last, ledgers in zip(rows.lasts, episodes, strict=True)
        ]
        found, metrics = self.outcomes(episodes, scored)
        outcomes = [self.kept(*each) for each in zip(found, episodes, strict=True)]
        groups = [trajectories[last].group for last in rows.lasts]
        failed = {group for group, o in zip(groups, outcomes, strict=True) if isinstance(o, RewardFailure)}
        all_failed = None if is_part else len(failed) == len(set(groups))
        self.check(episodes, [sample.text() for sample in scored], found, all_failed)
        kept = [i for i, t in enumerate(trajectories) if t.group not in failed]
        of_ledgers = [outcomes[number] for number in rows.numbers]
        counts = failure_counts(found, len(failed)) | (ending_counts(episodes) if self.has_turns else {})
        return self.select(trajectories, samples, of_ledgers, kept), metrics | counts

    def kept(self, outcome: Outcome, ledgers: Sequence[Trajectory]) -> Outcome:
        """Return the outcome of an episode; with agent.on_error=zero a reward of 0 for one whose environment failed."""
        if self.on_failed_episode != "zero" or not ledgers[-1].failure:
            return outcome
        for ledger in ledgers:
            ledger.turn_rewards[:] = 0
        return Scored(0.0, 0.0, ledgers[-1].extra)

    def check(
        self,
        episodes: Sequence[Sequence[Trajectory]],
        rows: Sequence[Mapping[str, str]],
        outcomes: Sequence[Outcome],
        all_failed: bool | None,
    ) -> None:
        """Check the failures of reward sources, and those of environments, each by its flag."""
        failed = [bool(ledgers[-1].failure) for ledgers in episodes]
        if self.on_failed_episode is None:
            flag = "agent.on_error" if any(failed) else "reward.on_error"
            check_failures(self.config, self.journal, rows, outcomes, all_failed, flag)
            return
        pairs = [*zip(outcomes, failed, strict=True)]
        of_sources = [Scored(0.0, 0.0) if of_agent else outcome for outcome, of_agent in pairs]
        of_agents = [outcome if of_agent else Scored(0.0, 0.0) for outcome, of_agent in pairs]
        check_failures(self.config, self.journal, rows, of_sources, all_failed)
        config = replace(self.config, on_error=self.on_failed_episode)
        check_failures(config, self.journal, rows, of_agents, all_failed, "agent.on_error")

    def check_error_rate(self, failures: float, samples: float, has_rewards: bool = True) -> None:
        """End the run if too many of the samples of a step failed, of which `score` saw only parts, or all of them."""
        if not has_rewards:
            raise RunError(
                f"none of {samples:g} samples has a reward (logs/{FAILURES} has the reasons); no group is left"
            )
        if failures > self.config.max_error_rate * samples:
            raise RunError(
                f"{failures:g} of {samples:g} samples have no reward (logs/{FAILURES} has the reasons); that is more "
                f"than reward.max_error_rate={self.config.max_error_rate:g}"
            )

    def outcomes(
        self, episodes: Sequence[Sequence[Trajectory]], samples: Sequence[Sample]
    ) -> tuple[list[Outcome], dict[str, float]]:
        """Return an outcome per episode, and metrics: that of its environment, else that of the reward sources, which
        see `samples`; with agent.add_reward the sum of both. Without either (a teacher alone) every reward is 0."""
        given = [environment_outcome(ledgers) for ledgers in episodes]
        both = self.adds and self.rewards is not None
        places = [i for i, each in enumerate(given) if each is None or (both and isinstance(each, Scored))]
        outcomes: list[Outcome] = [each or Scored(0.0, 0.0) for each in given]
        metrics: dict[str, float] = {}
        if self.rewards is not None and places:
            scored, metrics = self.rewards.score([samples[place] for place in places])
            for place, outcome in zip(places, scored, strict=True):
                outcomes[place] = added(given[place], outcome)
        self.tell(len(given) - len(places) - sum(isinstance(each, RewardFailure) for each in given), len(given))
        return [with_metrics(o, ledgers[-1].extra) for o, ledgers in zip(outcomes, episodes, strict=True)], metrics

    def tell(self, count: int, total: int) -> None:
        """Say once that the reward sources of the run score only a part of its episodes."""
        if count and self.rewards is not None and not self.has_told:
            what = f"{count} of {total} episodes have a reward of their own, so the reward sources do not score them"
            self.journal.info(f"{what}; agent.add_reward=true adds theirs")
            self.has_told = True

    def samples(self, trajectories: Sequence[Trajectory]) -> list[Sample]:
        """Return what rewards see. Special tokens stay in the query, as a reward model would see them."""
        prompts, queries = [t.prompt for t in trajectories], query_texts(self.tokenizer, [t.ids for t in trajectories])
        responses = self.tokenizer.batch_decode([answer_ids(t) for t in trajectories], skip_special_tokens=True)
        return [
            Sample(query, p.text, response, p.label, p.datasource, json.loads(p.columns), t.ids)
            for t, p, query, response in zip(trajectories, prompts, queries, responses, strict=True)
        ]

    def turns(self, ledgers: Sequence[Trajectory]) -> Sequence[str]:
        """Return the texts of all turns of the model in an episode; empty if there is one turn."""
        turns = [turn for ledger in ledgers for turn in ledger.turns]
        return self.tokenizer.batch_decode(turns, skip_special_tokens=True) if len(turns) > 1 else ()

    def select(
        self,
        trajectories: Sequence[Trajectory],
        samples: Sequence[Sample],
        outcomes: Sequence[Outcome],
        kept: Sequence[int],
    ) -> ScoredTrajectories:
        chosen = [outcome for i in kept if isinstance(outcome := outcomes[i], Scored)]
        return ScoredTrajectories(
            [trajectories[i] for i in kept],
            np.array([s.reward for s in chosen], np.float32),
            np.array([s.score for s in chosen], np.float32),
            [samples[i].response for i in kept],
            [samples[i].query for i in kept],
            [s.extra for s in chosen],
            retries=np.array([s.retries for s in chosen], np.int32),
        )


def place_of(t: Trajectory) -> tuple[bool, int, int, int]:
    """Return what the ledgers of a step are sorted by."""
    return t.greedy, t.group, t.sample, t.fork


def answer_ids(t: Trajectory) -> NDArray[np.int64]:
    """Return the tokens that rewards take for the response: all that follows the prompt, or the last turn where an
    environment wrote a part of that. What a tool printed is not the model's answer."""
    return t.turns[-1] if ENVIRONMENT in t.owner else t.response_ids


def environment_outcome(ledgers: Sequence[Trajectory]) -> Outcome | None:
    """Return what the environment of an episode says of it; None if it says nothing. The rewards of its turns count."""
    t = ledgers[-1]
    if t.failure:
        return RewardFailure(t.failure, "timeout" if t.ending is Ending.TIMED_OUT else "error")
    if t.reward is None:
        return None
    turns = math.fsum(reward for each in ledgers for reward in each.turn_rewards.tolist())
    return Scored(t.reward + turns, t.reward if t.score is None else t.score)


def added(given: Outcome | None, outcome: Outcome) -> Outcome:
    """Return what the reward sources say of an episode, with the reward that its environment gave added. The score
    remains that of the sources."""
    if not (isinstance(given, Scored) and isinstance(outcome, Scored)):
        return outcome
    return replace(outcome, reward=given.reward + outcome.reward)


def with_metrics(outcome: Outcome, extra: dict[str, float]) -> Outcome:
    """Return an outcome with the metrics of its episode."""
    return replace(outcome, extra=outcome.extra | extra) if extra and isinstance(outcome, Scored) else outcome


def query_texts(tokenizer: PreTrainedTokenizerBase, sequences: Sequence[NDArray[np.int64]]) -> list[str]:
    """Return prompts with responses as the text that rewards see: special tokens are part of it, so one that a model
    finished ends with its end-of-sequence token, and one that the length limit cut off does not."""
    return tokenizer.batch_decode(sequences, skip_special_tokens=False)


def failure_counts(outcomes: Sequence[Outcome], dropped: int) -> dict[str, float]:
    """Return how many samples have no reward, by kind, how many groups that costs, and the number of retries."""
    return {
        "rollout/dropped_groups": float(dropped),
        "reward/errors": float(sum(kind_of(outcome) == "error" for outcome in outcomes)),
        "reward/timeouts": float(sum(kind_of(outcome) == "timeout" for outcome in outcomes)),
        "reward/retries": float(sum(outcome.retries for outcome in outcomes)),
    }


def ending_counts(episodes: Sequence[Sequence[Trajectory]]) -> dict[str, float]:
    """Return how many episodes ended for each of the reasons that there are."""
    counts = Counter(ledgers[-1].ending for ledgers in episodes)
    return {f"{ENDED}{ending.value}": float(counts[ending]) for ending in Ending}


def check_failures(
    config: RewardConfig,
    journal: Journal,
    rows: Sequence[Mapping[str, str]],
    outcomes: Sequence[Outcome],
    all_failed: bool | None,
    flag: str = "reward.on_error",
) -> None:
    """End the run if there are more failures than it may go on with, else print a line about them. Either way each
    failure is written to a log, with what `rows` says of it. `all_failed`: None for a part of a step, whose number of
    failures is checked later."""
    failures = [outcome for outcome in outcomes if isinstance(outcome, RewardFailure)]
    if not failures:
        return
    journal.folder.logs.mkdir(parents=True, exist_ok=True)
    with (journal.folder.logs / FAILURES).open("a") as file:
        for row, outcome in zip(rows, outcomes, strict=True):
            if isinstance(outcome, RewardFailure):
                file.write(json.dumps(dict(row) | asdict(outcome)) + "\n")
    first = f"{failures[0].kind}: {printable(failures[0].reason, keep_lines=True)}"
    report = f"{len(failures)} of {len(outcomes)} samples have no reward ({first})"
    log = journal.folder.logs / REWARD_LOG
    if log.exists() and log.stat().st_size:
        report += f"; what the reward code printed is in {log}"
    if config.on_error == "stop":
        raise RunError(f"{report}; repair the {flag.partition('.')[0]}, or drop such groups with {flag}=drop")
    if all_failed:
        raise RunError(f"{report}; no group is left")
    if all_failed is not None and len(failures) > config.max_error_rate * len(outcomes):
        raise RunError(f"{report}; that is more than reward.max_error_rate={config.max_error_rate:g}")
    journal.info(f"{report}; " + ("their reward is 0" if config.on_error == "zero" else "their groups are left out"))


def kind_of(outcome: Outcome) -> str | None:
    """Return error, timeout, or None for a score."""
    return outcome.kind if isinstance(outcome, RewardFailure) else None
