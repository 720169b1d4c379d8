"""The sources of a run's rewards: opened, asked about the samples that they take, and added up.

A sample's reward is sum_i weight_i reward_i over the sources that score its `datasource`; its score is the same sum
over the scores divided by sum_i weight_i. Sources that share a name in `best_of` count as one, the one with the largest
weight_i reward_i. It fails when one of them fails, and the reason names that source. With reward.reward_key=<source>
the reward is that of one source, without its weight.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from pathlib import Path
from types import MappingProxyType

from rlhf_suite.background import together
from rlhf_suite.config.declarations.reward import (
    NamedSourceConfig,
    RewardConfig,
    is_http,
    key_of,
    urls,
)
from rlhf_suite.errors import RunError, UserError
from rlhf_suite.rewards.base import Choice, LabelError, Outcome, RewardFailure, RewardSource, Sample, Scored
from rlhf_suite.rewards.judge import JudgeReward
from rlhf_suite.rewards.judge_calls import JudgeCalls
from rlhf_suite.rewards.judge_model import JudgeModel, JudgeServers
from rlhf_suite.rewards.remote import RemoteReward, drops_rows
from rlhf_suite.rewards.retry import with_retries
from rlhf_suite.rewards.reward_process import IsolatedScorer, ParallelScorer
from rlhf_suite.waits import waiting

CODE = "code"  # the rule whose labels hold tests
SAMPLE = 256  # rows whose labels are read before a run
ONLY = ""  # the name of a source that is not one of several


@dataclass(frozen=True)
class NamedSource:
    """A source with its name, weight and data sets."""

    name: str
    config: NamedSourceConfig
    reward: RewardSource
    num_retries: int  # of samples without a score

    def takes(self, datasource: str) -> bool:
        """Return whether the source scores samples of this kind."""
        return self.config.datasets is None or datasource in self.config.datasets


class Rewards:
    """All sources of `config`, added up. What reward code prints goes to `log`.

    Threads may call `score` at the same time, but one call waits for the other, since a source has one process. Who
    must not wait scores with sources of its own (`beside`).
    """

    def __init__(  # noqa: PLR0913 - all that sources are made of
        self,
        config: RewardConfig,
        log: Path,
        models: Mapping[str, RewardSource] = MappingProxyType({}),
        process: RewardSource | None = None,
        *,
        judge: JudgeModel | None = None,
        seed: int = 0,
        judge_calls: JudgeCalls | None = None,
    ) -> None:
        """Open the sources. `models` are the reward models of the run by the keys of their sections, and `process` is
        its process reward model. `judge`: the chat model of the run that judges; None: servers do. `seed`: of the run.
        `judge_calls` are those that other sources of the run have open.

        Raises:
            UserError: a source cannot be used.
        """
        self.lock, self.is_closed = threading.Lock(), False
        self.judge_calls = judge_calls or JudgeCalls(log.parent, config.judge)
        self.judge = judge or JudgeServers(config.judge, config.http, drops=drops_rows(config))
        self.seed = seed
        self.reopen = partial(Rewards, config, log, models, process, judge=judge, seed=seed)
        self.trained = find_trained_source(config)
        with ExitStack() as stack:  # closes those that are open when the next cannot be
            self.sources: list[NamedSource] = []
            for name, source in list_sources(config).items():
                if source.process or source.model_name_or_path is not None:
                    reward = process if source.process else models.get(key_of(name))
                    num_retries = 0  # it would say the same again
                    assert reward is not None, "the reward models of a run are started before its rewards"
                else:
                    reward, num_retries = self.open_text(with_key(config, name), source, log), config.num_retries
                stack.callback(reward.close)
                self.sources.append(NamedSource(name, source, reward, num_retries))
            self.stack = stack.pop_all()

    @property
    def reads_text_alone(self) -> bool:
        """Whether no source is a model of the run."""
        return not any(source.config.process or source.config.model_name_or_path for source in self.sources)

    def beside(self) -> Rewards:
        """Open the sources of text once more, for an evaluation that rollouts do not wait for. The models of the run
        are the same. What is returned is closed with these sources."""
        again = self.reopen(judge_calls=self.judge_calls)
        self.stack.callback(again.close)
        return again

    def close(self) -> None:
        """Close all sources. A call that is under way ends soon, with an error."""
        self.is_closed = True
        self.stack.close()

    def score(self, samples: Sequence[Sample]) -> tuple[list[Outcome], dict[str, float]]:
        """Return an outcome per sample, and metrics of each source; sources work at the same time. What sources of text
        fail to score is tried again, as often as reward.num_retries says."""
        with self.lock:
            if self.is_closed:
                raise RunError("the run has ended")
            answers = together("rewards", [partial(ask, source, samples) for source in self.sources])
        answered = [*zip(self.sources, answers, strict=True)]
        outcomes = [
            add_up([(source, answer.outcomes[i]) for source, answer in answered if i in answer.outcomes], self.trained)
            for i in range(len(samples))
        ]
        metrics = Counter[str]()  # all of them are sums
        for source, answer in answered:
            metrics.update(answer.metrics(source.name))
            if isinstance(source.reward, JudgeReward):
                metrics.update(source.reward.counts.take())
        return outcomes, dict(metrics)

    def open_text(self, config: RewardConfig, source: NamedSourceConfig, log: Path) -> RewardSource:
        """Open a source that reads text: servers, a judge, a rule in processes of its own, or a file in one."""
        choice = Choice(config.reward_key, config.combine)
        if is_http(source.remote_url):
            return RemoteReward(urls(source.remote_url), config.http, choice, drops=drops_rows(config))
        if source.rubric is not None:
            rubric = Path(source.rubric)
            return JudgeReward(rubric, config.judge, self.judge, self.judge_calls, choice, seed=self.seed)
        own = replace(config, rule=source.rule, remote_url=source.remote_url)
        return IsolatedScorer(own, log) if source.rule is None else ParallelScorer(own, log)


@dataclass(frozen=True)
class Answer:
    """What one source says of the samples that it takes, by index, and how long it took."""

    outcomes: dict[int, Outcome]
    seconds: float

    def metrics(self, name: str) -> dict[str, float]:
        """Return `reward/<name>/...`, all of them sums; nothing for a source that is the only one of a run."""
        if name == ONLY or not self.outcomes:
            return {}
        kinds = [outcome.kind for outcome in self.outcomes.values() if isinstance(outcome, RewardFailure)]
        counts = {
            "rows": float(len(self.outcomes)),
            "errors": float(kinds.count("error")),
            "timeouts": float(kinds.count("timeout")),
            "retries": float(sum(outcome.retries for outcome in self.outcomes.values())),
            "seconds": self.seconds,
        }
        return {f"reward/{name}/{key}": value for key, value in counts.items()}


def ask(source: NamedSource, samples: Sequence[Sample]) -> Answer:
    """Let a source score the samples that it takes."""
    began = time.perf_counter()
    chosen = [i for i, sample in enumerate(samples) if source.takes(sample.datasource)]
    if not chosen:
        return Answer({}, 0.0)
    name = "the reward" if source.name == ONLY else f"the reward {source.name}"
    with waiting(f"the scores of {len(chosen)} samples by {name}"):
        results = with_retries(source.reward.score, [samples[i] for i in chosen], source.num_retries)
    return Answer(dict(zip(chosen, results, strict=True)), time.perf_counter() - began)


def add_up(parts: Sequence[tuple[NamedSource, Outcome]], trained: str | None = None) -> Outcome:
    """Return the weighted sum of what the sources say of one sample. `trained`: the one whose reward is taken."""
    counted: dict[tuple[bool, str], tuple[float, float, float]] = {}  # weighted reward, weighted score, weight
    extra: dict[str, float] = {}
    alone: float | None = None  # the reward of the source `trained`
    steps: list[float] = []
    reasons: dict[str, str] = {}
    retries = sum(outcome.retries for _, outcome in parts)
    for source, outcome in parts:
        prefix = f"{source.name}/" if source.name != ONLY else ""
        if isinstance(outcome, RewardFailure):
            reason = f"source {source.name}: {outcome.reason}" if prefix else outcome.reason
            return RewardFailure(reason, outcome.kind, retries)
        if weight := source.config.weight:
            key = (source.config.best_of is not None, source.config.best_of or source.name)
            mine = (weight * outcome.reward, weight * outcome.score, weight)
            counted[key] = max(counted.get(key, mine), mine)
        if source.name == trained:
            alone = outcome.reward
        steps += outcome.steps
        extra |= {f"{prefix}{key}": value for key, value in outcome.extra.items()}
        reasons |= {f"{prefix}{key}": value for key, value in outcome.reasons.items()}
        if prefix:
            extra[f"{prefix}mean"] = outcome.reward  # its mean over samples is logged
    if trained is not None and alone is None:
        return RewardFailure(f"the source {trained} of reward.reward_key does not score its datasource", "error")
    if not counted:
        return RewardFailure("no source of reward.sources with a weight above 0 scores its datasource", "error")
    reward, score, weights = (sum(values) for values in zip(*counted.values(), strict=True))
    scored = Scored(reward if alone is None else alone, score / weights, extra, retries, steps)
    return replace(scored, reasons=reasons)


def list_sources(config: RewardConfig) -> dict[str, NamedSourceConfig]:
    """Return reward.sources, or the one source that `reward` names itself."""
    if config.sources:
        return config.sources
    steps = config.scores_steps
    return {
        ONLY: NamedSourceConfig(config.rule, config.remote_url, config.rubric, config.model_name_or_path, process=steps)
    }


def find_trained_source(config: RewardConfig) -> str | None:
    """Return the one of several sources that reward.reward_key names, in <source> or <source>/<name>."""
    return config.reward_key.partition("/")[0] if config.sources and config.reward_key is not None else None


def with_key(config: RewardConfig, source: str) -> RewardConfig:
    """Return the flags of one source: reward.reward_key is a name of its own, null where it names another source."""
    if not config.sources or config.reward_key is None:
        return config
    name, _, part = config.reward_key.partition("/")
    return replace(config, reward_key=part if name == source and part else None)


def check_labels(config: RewardConfig, rows: Iterable[tuple[str, str, str]]) -> None:
    """Refuse labels (where, datasource, label) that cannot judge a program, among the first `SAMPLE` rows: one of them
    would end the run, or with reward.on_error=drop so many that it ends too."""
    using = [(name, source) for name, source in list_sources(config).items() if source.rule == CODE]
    if not using:
        return
    from rlhf_suite.rewards.code import tests_of

    judged, bad = 0, list[str]()
    for where, datasource, label in islice(rows, SAMPLE):
        name = next((name for name, source in using if source.datasets is None or datasource in source.datasets), None)
        if name is None:
            continue
        judged += 1
        try:
            tests_of(label)
        except LabelError as error:
            bad.append(f"{where}: {key_of(name)}.rule={CODE}: {error}")
    if bad and (config.on_error == "stop" or len(bad) > config.max_error_rate * judged):
        raise UserError(f"{bad[0]} ({len(bad)} of the first {judged} labels have such a problem)")


def check_routes(config: RewardConfig, rows: Iterable[tuple[str, str]]) -> None:
    """Refuse rows (where, datasource) that no source with a weight above 0 scores."""
    trained = find_trained_source(config)
    takers = [
        source
        for name, source in list_sources(config).items()
        if source.weight > 0 and (trained is None or name == trained)
    ]
    if any(source.datasets is None for source in takers):
        return
    known = {name for source in takers for name in source.datasets or ()}
    for where, datasource in rows:
        if datasource not in known:
            raise UserError(
                f"{where}: no source of reward scores its datasource {datasource!r}. The reward.sources with a weight "
                f"above 0 score {', '.join(sorted(known)) or 'nothing'}: add it to the datasets of one of them"
            )
