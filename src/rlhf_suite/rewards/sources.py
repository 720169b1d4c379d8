"""The sources of a run's rewards: opened, asked for the rows that are theirs, and added up.

A row's reward is sum_i weight_i reward_i over the sources that score its `datasource`; its score is the same sum over
the scores divided by sum_i weight_i. It fails when one of them fails, and the reason names that source.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

from rlhf_suite.config.reward import JudgeConfig, NamedSourceConfig, TextRewardConfig, is_http, urls
from rlhf_suite.errors import UserError
from rlhf_suite.rewards.base import Outcome, RewardFailure, RewardRow, Scored
from rlhf_suite.rewards.remote import RemoteReward
from rlhf_suite.rewards.retry import with_retries
from rlhf_suite.rewards.reward_process import IsolatedScorer

# What a model that runs beside the policy says of the rows of these indices.
ByModel = Callable[[NamedSourceConfig, Sequence[int]], Sequence[Outcome]]
ONLY = ""  # the name of a source that is not one of several


class TextReward(Protocol):
    """Scores text. `close` ends what it started."""

    def score(self, rows: list[RewardRow]) -> list[Outcome]:
        """One outcome per row, in their order."""
        ...

    def close(self) -> None: ...


@dataclass(frozen=True)
class Source:
    """A source by name. `text` is None for a model that runs beside the policy."""

    name: str
    config: NamedSourceConfig
    text: TextReward | None

    def takes(self, datasource: str) -> bool:
        return self.config.datasets is None or datasource in self.config.datasets


class Rewards:
    """All sources of `config`. What reward code prints goes to `log`."""

    def __init__(self, config: TextRewardConfig, log: Path) -> None:
        """Open them.

        Raises:
            UserError: one cannot be used.
        """
        with ExitStack() as stack:  # closes those that are open when the next cannot be
            self.sources, self.num_retries = list[Source](), config.num_retries
            for name, source in named_sources(config).items():
                text = open_text(config, source, log)
                if text is not None:
                    stack.callback(text.close)
                self.sources.append(Source(name, source, text))
            self.stack = stack.pop_all()

    def close(self) -> None:
        self.stack.close()

    def score(
        self, rows: Sequence[RewardRow], by_model: ByModel | None = None
    ) -> tuple[list[Outcome], dict[str, float]]:
        """An outcome per row, and metrics of each source; sources work at the same time. What text sources fail to
        score is tried again, as often as reward.num_retries says."""
        with ThreadPoolExecutor(len(self.sources)) as pool:
            answers = [*pool.map(lambda source: ask(source, rows, by_model, self.num_retries), self.sources)]
        outcomes = [
            added_up([(source, answer.outcomes[i]) for source, answer in answered if i in answer.outcomes])
            for answered in [[*zip(self.sources, answers, strict=True)]]
            for i in range(len(rows))
        ]
        metrics: dict[str, float] = {}
        for source, answer in zip(self.sources, answers, strict=True):
            metrics |= answer.metrics(source.name)
        return outcomes, metrics


@dataclass(frozen=True)
class Answer:
    """What one source said of the rows that are its own, by index, and how long it took."""

    outcomes: dict[int, Outcome]
    seconds: float

    def metrics(self, name: str) -> dict[str, float]:
        """`reward/<name>/...`, all of them sums; a source that is not one of several has them as the run's own."""
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


def ask(source: Source, rows: Sequence[RewardRow], by_model: ByModel | None, num_retries: int) -> Answer:
    """Let a source score its rows."""
    began = time.perf_counter()
    chosen = [i for i, row in enumerate(rows) if source.takes(row.datasource)]
    if not chosen:
        return Answer({}, 0.0)
    if source.text is not None:
        found: Sequence[Outcome] = with_retries(source.text.score, [rows[i] for i in chosen], num_retries)
    else:
        assert by_model is not None, "a reward model beside the policy scores its tokens"
        found = by_model(source.config, chosen)
    return Answer(dict(zip(chosen, found, strict=True)), time.perf_counter() - began)


def added_up(parts: Sequence[tuple[Source, Outcome]]) -> Outcome:
    """The weighted sum of what the sources of one row said."""
    reward = score = weights = 0.0
    extra: dict[str, float] = {}
    retries = sum(outcome.retries for _, outcome in parts)
    for source, outcome in parts:
        prefix = f"{source.name}/" if source.name != ONLY else ""
        if isinstance(outcome, RewardFailure):
            reason = f"source {source.name}: {outcome.reason}" if prefix else outcome.reason
            return RewardFailure(reason, outcome.kind, retries)
        weight = source.config.weight
        reward, score, weights = reward + weight * outcome.reward, score + weight * outcome.score, weights + weight
        extra |= {f"{prefix}{key}": value for key, value in outcome.extra.items()}
        if prefix:
            extra[f"{prefix}mean"] = outcome.reward  # its mean over samples is logged
    if weights == 0:
        return RewardFailure("no source of reward.sources with a weight above 0 scores its datasource", "error")
    return Scored(reward, score / weights, extra, retries)


def named_sources(config: TextRewardConfig) -> dict[str, NamedSourceConfig]:
    """reward.sources, or the one source that `reward` names itself."""
    if config.sources:
        return config.sources
    process = isinstance(config, JudgeConfig) and config.process.enable
    return {ONLY: NamedSourceConfig(config.rule, config.remote_url, config.model_name_or_path, process=process)}


def open_text(config: TextRewardConfig, source: NamedSourceConfig, log: Path) -> TextReward | None:
    """The source, if it reads text; None for a model that runs beside the policy."""
    if source.model_name_or_path is not None or source.process:
        return None
    if is_http(source.remote_url):
        return RemoteReward(urls(source.remote_url), config.http)
    return IsolatedScorer(replace(config, rule=source.rule, remote_url=source.remote_url), log)


def check_routes(config: TextRewardConfig, rows: Iterable[tuple[str, str]]) -> None:
    """Refuse rows (where, datasource) that no source with a weight above 0 scores."""
    takers = [source for source in named_sources(config).values() if source.weight > 0]
    if any(source.datasets is None for source in takers):
        return
    known = {name for source in takers for name in source.datasets or ()}
    for where, datasource in rows:
        if datasource not in known:
            raise UserError(
                f"{where}: its datasource {datasource!r} has no source of reward. reward.sources with a weight above 0 "
                f"score {', '.join(sorted(known)) or 'nothing'}: add it to the datasets of one of them"
            )
