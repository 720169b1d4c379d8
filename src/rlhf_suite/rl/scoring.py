"""Scoring of groups of samples: ledgers of rollouts, evaluations and prompts of a file, or responses in a file. A
failure is never a silent zero."""

from __future__ import annotations

import asyncio
import json
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import chain, islice

import numpy as np
from numpy.typing import NDArray
from transformers import PreTrainedTokenizerBase

from rlhf_suite.config.declarations.agent import AgentConfig
from rlhf_suite.config.declarations.reward import RewardConfig
from rlhf_suite.data.ending import Ending
from rlhf_suite.data.trajectory import ENVIRONMENT, EpisodeRows, Trajectory
from rlhf_suite.errors import RunError
from rlhf_suite.foreign_text import printable
from rlhf_suite.launch.loop_thread import LoopThread
from rlhf_suite.rewards.base import Outcome, RewardFailure, Sample, Scored
from rlhf_suite.rewards.sources import Rewards
from rlhf_suite.rl.samples import ScoredTrajectories
from rlhf_suite.tracking.journal import Journal

REWARD_LOG, FAILURES = "reward.log", "reward_failures.jsonl"  # in the run folder's logs
REWARDS = "rewards"  # the thread of the loop in which they score
ENDED = "agent/ended/"  # begins the names of metrics that count episodes by their ending


@dataclass(frozen=True)
class ScoredGroup:
    """What the scoring of a group came to."""

    number: int
    samples: ScoredTrajectories | None  # None: one of its rewards failed
    episodes: int
    failures: int  # episodes without a reward
    objection: str | None = None  # of a filter: why it is not trained on


@dataclass(frozen=True)
class Scores:
    """What the scoring of groups came to: each of them by its number, and sums for the metrics."""

    groups: Mapping[int, ScoredGroup]
    counts: Mapping[str, float]


class SampleScorer:
    """Scores samples. One that cannot be scored ends the run or leaves its group out, and is reported."""

    def __init__(self, config: RewardConfig, rewards: Rewards | None, journal: Journal) -> None:
        self.config, self.rewards, self.journal = config, rewards, journal
        self.failed_by = ""  # the reason of the newest failure

    def score_batch(self, groups: Sequence[Sequence[tuple[str, Sample]]]) -> list[list[Scored] | None]:
        """Score all samples of a batch, each with its place in a file. Return None for a group that has a failure, and
        end the run if there are too many."""
        members = [
            (where, replace(sample, group=number)) for number, group in enumerate(groups) for where, sample in group
        ]
        assert self.rewards is not None, "a file has no scores of its own"
        outcomes = self.rewards.score([sample for _, sample in members])[0] if members else []
        self.report_failures([{"where": where} for where, _ in members], outcomes)
        left, result = iter(outcomes), list[list[Scored] | None]()
        for group in groups:
            scores = [outcome for outcome in islice(left, len(group)) if isinstance(outcome, Scored)]
            result.append(scores if len(scores) == len(group) else None)
        if failures := sum(isinstance(outcome, RewardFailure) for outcome in outcomes):
            self.check_error_rate(failures, len(outcomes), any(scores is not None for scores in result))
        return result

    def report_failures(
        self,
        rows: Sequence[Mapping[str, str]],
        outcomes: Sequence[Outcome],
        on_error: str | None = None,
        flag: str = "reward.on_error",
    ) -> None:
        """Write each failure to a log, with what `rows` says of it, and print a line about them, or end the run with
        it where `on_error` (None: that of the rewards), which the flag `flag` says, is stop."""
        failures = [outcome for outcome in outcomes if isinstance(outcome, RewardFailure)]
        if not failures:
            return
        logs, on_error = self.journal.folder.logs, on_error or self.config.on_error
        logs.mkdir(parents=True, exist_ok=True)
        with (logs / FAILURES).open("a") as file:
            for row, outcome in zip(rows, outcomes, strict=True):
                if isinstance(outcome, RewardFailure):
                    file.write(json.dumps(dict(row) | asdict(outcome)) + "\n")
        self.failed_by = first = f"{failures[0].kind}: {printable(failures[0].reason, keep_lines=True)}"
        report = f"{len(failures)} of {len(outcomes)} samples have no reward ({first})"
        log = logs / REWARD_LOG
        if log.exists() and log.stat().st_size:
            report += f"; what the reward code printed is in {log}"
        if on_error == "stop":
            raise RunError(f"{report}; repair the {flag.partition('.')[0]}, or drop such groups with {flag}=drop")
        self.journal.info(f"{report}; " + ("their reward is 0" if on_error == "zero" else "their groups are left out"))

    def check_error_rate(self, failures: float, samples: float, has_rewards: bool = True) -> None:
        """End the run if too many of the samples of a batch failed, or all of its groups are left out."""
        reasons = f"logs/{FAILURES} has the reasons"
        if self.failed_by:
            reasons += f", the newest is {self.failed_by}"
        if not has_rewards:
            raise RunError(
                f"none of {samples:g} samples has a reward ({reasons}), so no group is left. Repair the reward, and "
                "continue the run"
            )
        if failures > self.config.max_error_rate * samples:
            raise RunError(
                f"{failures:g} of {samples:g} samples have no reward ({reasons}). That is a larger share "
                f"than reward.max_error_rate={self.config.max_error_rate:g} allows. Repair the reward, or raise the "
                "flag, and continue the run"
            )


class Scorer(SampleScorer):
    """Scores ledgers."""

    def __init__(
        self,
        config: RewardConfig,
        tokenizer: PreTrainedTokenizerBase,
        rewards: Rewards | None,
        journal: Journal,
        agent: AgentConfig | None = None,
    ) -> None:
        super().__init__(config, rewards, journal)
        self.tokenizer = tokenizer
        self.on_failed_episode = agent.on_error if agent is not None else None  # None: as config.on_error
        self.adds = agent is not None and agent.add_reward
        self.has_turns = agent is not None and agent.has_turns
        self.has_told = False  # that the sources do not score all episodes

    @property
    def reads_text_alone(self) -> bool:
        """Whether every source reads text. A model would score other batches at other times, with other rounding, and
        may share its device with the engines."""
        return self.rewards is None or self.rewards.reads_text_alone

    def score(self, groups: Sequence[Sequence[Trajectory]]) -> Scores:
        """Score whole groups in one call of the sources. Failed samples end the run or drop their group, by
        reward.on_error; those whose environment failed by agent.on_error, which may also give them a reward of 0. The
        caller checks the share of failures of a whole batch (`check`), of which these may be a part.

        Of an episode with several ledgers the last one is scored, and its outcome is that of all of them.
        """
        trajectories = sorted(chain.from_iterable(groups), key=place_of)
        samples, rows = self.samples(trajectories), EpisodeRows.of(trajectories)
        episodes = rows.parts(trajectories)
        scored = [
            replace(samples[last], turns=self.turns(ledgers))
            for last, ledgers in zip(rows.lasts, episodes, strict=True)
        ]
        answers, metrics = self.outcomes(episodes, scored)
        self.report(episodes, [sample.text() for sample in scored], answers)
        outcomes = [self.score_failure(*pair) for pair in zip(answers, episodes, strict=True)]
        numbers = [trajectories[last].group for last in rows.lasts]
        failed = {group for group, o in zip(numbers, outcomes, strict=True) if isinstance(o, RewardFailure)}
        kept = [i for i, t in enumerate(trajectories) if t.group not in failed]
        of_ledgers = [outcomes[number] for number in rows.numbers]
        counts = failure_counts(answers, len(failed)) | (ending_counts(episodes) if self.has_turns else {})
        by_group = {g.trajectories[0].group: g for g in self.select(trajectories, samples, of_ledgers, kept).by_group()}
        sizes = Counter(numbers)
        failures = Counter(n for n, o in zip(numbers, answers, strict=True) if isinstance(o, RewardFailure))
        order = [group[0].group for group in groups]
        return Scores({n: ScoredGroup(n, by_group.get(n), sizes[n], failures[n]) for n in order}, metrics | counts)

    def check(self, groups: Iterable[ScoredGroup]) -> None:
        """End the run if too many of the samples of a batch failed, or all of its groups are left out."""
        every = [*groups]
        failures, episodes = sum(group.failures for group in every), sum(group.episodes for group in every)
        self.check_error_rate(failures, episodes, not every or any(group.samples is not None for group in every))

    def score_failure(self, outcome: Outcome, ledgers: Sequence[Trajectory]) -> Outcome:
        """Return the outcome of an episode; with agent.on_error=zero a reward of 0 for one whose environment failed."""
        if self.on_failed_episode != "zero" or not ledgers[-1].failure:
            return outcome
        for ledger in ledgers:
            ledger.turn_rewards[:] = 0
        return Scored(0.0, 0.0, ledgers[-1].extra)

    def report(
        self, episodes: Sequence[Sequence[Trajectory]], rows: Sequence[Mapping[str, str]], outcomes: Sequence[Outcome]
    ) -> None:
        """Report the failures of reward sources, and those of environments, each by its flag."""
        failed = [bool(ledgers[-1].failure) for ledgers in episodes]
        if self.on_failed_episode is None:
            flag = "agent.on_error" if any(failed) else "reward.on_error"
            self.report_failures(rows, outcomes, flag=flag)
            return
        pairs = [*zip(outcomes, failed, strict=True)]
        of_sources = [Scored(0.0, 0.0) if of_agent else outcome for outcome, of_agent in pairs]
        of_agents = [outcome if of_agent else Scored(0.0, 0.0) for outcome, of_agent in pairs]
        self.report_failures(rows, of_sources)
        self.report_failures(rows, of_agents, self.on_failed_episode, "agent.on_error")

    def outcomes(
        self, episodes: Sequence[Sequence[Trajectory]], samples: Sequence[Sample]
    ) -> tuple[list[Outcome], dict[str, float]]:
        """Return an outcome per episode, and metrics: that of its environment, else that of the reward sources, which
        see `samples`; with agent.add_reward the sum of both. Without either (a teacher alone) every reward is 0."""
        given = [environment_outcome(ledgers) for ledgers in episodes]
        both = self.adds and self.rewards is not None
        places = [i for i, outcome in enumerate(given) if outcome is None or (both and isinstance(outcome, Scored))]
        outcomes: list[Outcome] = [outcome or Scored(0.0, 0.0) for outcome in given]
        metrics: dict[str, float] = {}
        if self.rewards is not None and places:
            scored, metrics = self.rewards.score([samples[place] for place in places])
            for place, outcome in zip(places, scored, strict=True):
                outcomes[place] = add_outcomes(given[place], outcome)
        self.tell(len(given) - len(places) - sum(isinstance(outcome, RewardFailure) for outcome in given), len(given))
        return [with_metrics(o, ledgers[-1].extra) for o, ledgers in zip(outcomes, episodes, strict=True)], metrics

    def tell(self, count: int, total: int) -> None:
        """Say once that the reward sources of the run score only a part of its episodes."""
        if count and self.rewards is not None and not self.has_told:
            report = f"{count} of {total} episodes have a reward of their own, so the reward sources do not score them"
            self.journal.info(f"{report}; agent.add_reward=true adds theirs")
            self.has_told = True

    def samples(self, trajectories: Sequence[Trajectory]) -> list[Sample]:
        """Return what rewards see. Special tokens stay in the query, as a reward model would see them."""
        ids = [query_ids(t) for t in trajectories]
        prompts, queries = [t.prompt.plain or t.prompt for t in trajectories], query_texts(self.tokenizer, ids)
        responses = self.tokenizer.batch_decode([answer_ids(t) for t in trajectories], skip_special_tokens=True)
        return [
            Sample(
                query,
                p.text,
                response,
                p.label,
                p.datasource,
                json.loads(p.columns),
                read,
                t.image_files,
                group=t.group,
            )
            for t, p, read, query, response in zip(trajectories, prompts, ids, queries, responses, strict=True)
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
            reasons=[s.reasons for s in chosen] if any(s.reasons for s in chosen) else None,
        )


class ScoringInParts:
    """Scores groups while the engines write others: those that come while a part is scored are the next part.

    Its tasks run on the event loop of the engines' requests, and the sources of rewards in a thread of the loop.
    """

    def __init__(self, scorer: Scorer, loop: LoopThread) -> None:
        self.scorer, self.loop = scorer, loop
        self.waiting: list[list[Trajectory]] = []
        self.next: asyncio.Task[Mapping[int, ScoredGroup]] | None = None  # the scores of those that wait
        self.lock = asyncio.Lock()  # one part is scored at a time

    def start(self, responses: Future[list[Trajectory]]) -> Future[ScoredGroup]:
        """Score a group when its responses are there. May be called on any thread."""
        return self.loop.start(self.score(responses))

    async def score(self, responses: Future[list[Trajectory]]) -> ScoredGroup:
        """Return the scores of a group whose responses are still to come."""
        group = await asyncio.wrap_future(responses)
        self.waiting.append(group)
        part = self.next = self.next or asyncio.create_task(self.score_part())
        return (await part)[group[0].group]

    async def score_part(self) -> Mapping[int, ScoredGroup]:
        """Score all groups that wait when the part before them is scored."""
        async with self.lock:
            groups, self.waiting, self.next = self.waiting, [], None
            scores = await self.loop.run_blocking(REWARDS, partial(self.scorer.score, groups))
            return scores.groups


def place_of(t: Trajectory) -> tuple[bool, int, int, str, int]:
    """Return what the ledgers of a step are sorted by."""
    return t.greedy, t.group, t.sample, t.role, t.fork


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
    turns = math.fsum(reward for ledger in ledgers for reward in ledger.turn_rewards.tolist())
    return Scored(t.reward + turns, t.reward if t.score is None else t.score)


def add_outcomes(given: Outcome | None, outcome: Outcome) -> Outcome:
    """Return what the reward sources say of an episode, with the reward that its environment gave added. The score
    remains that of the sources."""
    if not (isinstance(given, Scored) and isinstance(outcome, Scored)):
        return outcome
    return replace(outcome, reward=given.reward + outcome.reward)


def with_metrics(outcome: Outcome, extra: dict[str, float]) -> Outcome:
    """Return an outcome with the metrics of its episode."""
    return replace(outcome, extra=outcome.extra | extra) if extra and isinstance(outcome, Scored) else outcome


def query_ids(trajectory: Trajectory) -> NDArray[np.int64]:
    """Return the tokens of prompt and response that rewards see: the prompt does not ask for data.target_reward, since
    a reward model has never read that text and would score it."""
    prompt, ids = trajectory.prompt, trajectory.ids
    return ids if prompt.plain is None else np.concatenate([prompt.plain.ids, ids[len(prompt.ids) :]]).astype(ids.dtype)


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
    return {f"{ENDED}{ending.value}": float(counts[ending]) for ending in Ending if ending is not Ending.COMPACTED}


def kind_of(outcome: Outcome) -> str | None:
    """Return error, timeout, or None for a score."""
    return outcome.kind if isinstance(outcome, RewardFailure) else None
