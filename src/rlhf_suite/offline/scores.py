"""Rows with a prompt and a response to rows with scores: by a reward that reads text, or by a reward model."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from rlhf_suite.algo.scores import normalize_scores
from rlhf_suite.config.data import ScoreDataConfig, ScoredRowsConfig
from rlhf_suite.config.runs import ScoreRun
from rlhf_suite.data.batch import Example, TokenBatch, collate
from rlhf_suite.data.render import columns_text, label_text, text_of
from rlhf_suite.data.row import BadRows, Row, RowError, joined_columns, required
from rlhf_suite.data.row_range import RowOrError, RowSource
from rlhf_suite.data.sources import DATASET
from rlhf_suite.data.steps import SolutionEncoder
from rlhf_suite.models.process_reward_model import StepScores
from rlhf_suite.offline.batch_job import Done
from rlhf_suite.offline.responses import ResponseEncoder, has_open_end, reward_query, whole_text
from rlhf_suite.offline.scored_rows import best, pair, with_columns
from rlhf_suite.rewards.base import Outcome, RewardFailure, RewardRow, Scored
from rlhf_suite.rewards.remote import RemoteReward
from rlhf_suite.rewards.sources import Rewards
from rlhf_suite.rl.model_groups import ProcessRewardGroup, RewardGroup
from rlhf_suite.rl.reward_sources import outcome, step_scores
from rlhf_suite.rl.scoring import check_failures
from rlhf_suite.tracking.journal import Journal

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

T = TypeVar("T")
OPEN_END = "sent to a reward server without the end-of-sequence token of a finished response (data.response_end)"
PROMPT = "prompt"  # the column of task=generate


class RewardModel(Protocol[T]):
    """What gives scores."""

    def read(self, row: Row) -> T:
        """What it needs of a row; RowError says why the row cannot be scored."""
        ...

    def judge(self, items: Sequence[T]) -> Sequence[Outcome]:
        """One outcome per item."""
        ...


class TextJudge:
    """A rule, a file or servers."""

    def __init__(self, data: ScoreDataConfig, reward: Rewards) -> None:
        self.data, self.reward = data, reward
        self.asks_servers = any(isinstance(source.text, RemoteReward) for source in reward.sources)

    def read(self, row: Row) -> RewardRow:
        return text_row(row, self.data, self.data.output_key)

    def judge(self, items: Sequence[RewardRow]) -> Sequence[Outcome]:
        return self.reward.score(items)[0]


def text_row(row: Row, data: ScoredRowsConfig, response_key: str | None) -> RewardRow:
    """Return what rewards that read text are asked about a row; RowError says why it cannot be scored. Without a column
    of responses the label is taken for one, and it is finished."""
    if response_key is None:
        assert data.label_key is not None, "checked with the flags"
        prompt, response = (label_text(joined_columns(row, key)) for key in (data.input_key, data.label_key))
        query = prompt + response + data.response_end
    else:
        prompt, response = (label_text(joined_columns(row, key)) for key in (data.input_key, response_key))
        query = reward_query(row, data, prompt, response)
    label = "" if data.label_key is None else label_text(required(row, data.label_key))
    source = row.values.get("datasource")
    columns = json.loads(columns_text(row, data.reward_columns))
    return RewardRow(query, prompt, response, label, "default" if source is None else str(source), columns)


class ModelJudge:
    """A reward model. `constants`: mean and deviation by which its scores are standardised."""

    def __init__(
        self,
        data: ScoreDataConfig,
        tokenizer: PreTrainedTokenizerBase,
        group: RewardGroup,
        constants: tuple[float, float] | None,
    ) -> None:
        self.encoder = ResponseEncoder(tokenizer, data)
        self.group, self.constants = group, constants

    def read(self, row: Row) -> Example:
        """Return the tokens that a rollout with this response would have."""
        return self.encoder.encode(row)

    def judge(self, items: Sequence[Example]) -> Sequence[Outcome]:
        scores = self.group.scores(collate(items, TokenBatch)).result()
        if self.constants is not None:
            scores = normalize_scores(scores, *self.constants)
        return [Scored(score, score) for score in scores.tolist()]


@dataclass(frozen=True)
class StepScored(Scored):
    """A response whose steps are scored one by one."""

    steps: list[float] = field(default_factory=list)


class StepJudge:
    """A process reward model, which reads text with its own tokenizer. What it scores from P(good) of the steps is
    their `aggregate`."""

    def __init__(
        self, data: ScoreDataConfig, encoder: SolutionEncoder, group: ProcessRewardGroup, aggregate: str
    ) -> None:
        self.data, self.encoder, self.group, self.aggregate = data, encoder, group, aggregate

    def read(self, row: Row) -> Example:
        """Return the solution laid out in the model's own template; the prompt of `task=generate` is rendered already,
        and is taken as it is, as rollouts are scored."""
        prompt, response = text_of(row, self.data.input_key), label_text(joined_columns(row, self.data.output_key))
        is_rendered = self.data.input_key == PROMPT and whole_text(row, self.data) is not None
        return self.encoder.encode(prompt, response, is_rendered)

    def judge(self, items: Sequence[Example]) -> Sequence[Outcome]:
        return [self.outcome(each) for each in step_scores(self.group, self.encoder, items)]

    def outcome(self, steps: StepScores) -> Outcome:
        result = outcome(steps, self.aggregate, self.encoder.form.max_len)
        if isinstance(result, RewardFailure):
            return result
        return StepScored(result.reward, result.score, steps=steps.scores)


class RowScorer:
    """Scores chunks of rows."""

    def __init__(self, config: ScoreRun, rows: RowSource, judge: RewardModel[Any], journal: Journal) -> None:
        self.config, self.rows, self.judge, self.journal = config, rows, judge, journal
        self.bad = BadRows(config.data.on_bad_row)

    def score(self, chunks: Iterable[tuple[range, list[RowOrError]]]) -> Iterator[Done]:
        """The chunks with their scores, in order."""
        for numbers, rows in chunks:
            yield self.scored(numbers, rows)

    def scored(self, numbers: range, given: Sequence[RowOrError]) -> Done:
        """A chunk. The rows of a prompt one of whose scores failed are left out (reward.on_error=drop)."""
        groups = self.groups(given)
        outcomes = self.judge.judge([item for group in groups for _, item in group]) if groups else []
        by_group, left = [], iter(outcomes)
        for group in groups:
            by_group.append([next(left) for _ in group])
        failed = [any(isinstance(each, RewardFailure) for each in some) for some in by_group]
        where = [{"where": row.where} for group in groups for row, _ in group]
        check_failures(self.config.reward, self.journal, where, outcomes, all(failed))
        written: list[dict[str, Any]] = []
        scores: list[float] = []
        for group, some, has_failed in zip(groups, by_group, failed, strict=True):
            if not has_failed:
                known = [each for each in some if isinstance(each, Scored)]
                scores += [each.score for each in known]
                written += self.chosen([row.values for row, _ in group], known)
        sums = {
            "rows": len(outcomes),
            "skipped": len(given) - len(outcomes),
            "written": len(written),
            "scored": len(scores),
            "score": sum(scores),
        }
        return Done(numbers.stop, written, sums)

    def groups(self, given: Sequence[RowOrError]) -> list[list[tuple[Row, Any]]]:
        """The rows that can be scored with what the judge reads of them, those of one prompt together."""
        groups: list[list[tuple[Row, Any]]] = []
        is_new = True
        for row, begins in self.rows.with_group_starts(iter(given)):
            is_new = is_new or begins
            try:
                if isinstance(row, RowError):
                    raise row
                item = self.judge.read(row)
            except RowError as error:
                self.bad.add(error.where, error.reason)
                continue
            if isinstance(self.judge, ModelJudge) and item.truncated:
                self.bad.note(row.where, "cut off at data.max_len")
            if isinstance(self.judge, TextJudge) and self.judge.asks_servers and has_open_end(row, self.config.data):
                self.bad.note(row.where, OPEN_END)
            groups += [[]] if is_new else []
            groups[-1].append((row, item))
            is_new = False
        return groups

    def chosen(self, rows: Sequence[dict[str, object]], scored: Sequence[Scored]) -> Iterator[dict[str, Any]]:
        """What is written of the rows of one prompt."""
        score, scores = self.config.score, [each.score for each in scored]
        if score.pairs:
            made = pair(rows, scores, self.config.data.output_key)
            if made is not None:
                yield made
            return
        for index in [best(scores)] if score.best_of_n else range(len(rows)):
            of_row = scored[index]
            steps = {"step_scores": of_row.steps} if isinstance(of_row, StepScored) else {}
            yield with_columns(rows[index], {"score": scores[index]} | steps)


def row_source(config: ScoreRun) -> RowSource:
    """The rows of `data.dataset`; those of one prompt, next to each other, belong together."""
    data, columns = config.data, [name.strip() for name in config.data.input_key.split(",")]
    assert data.dataset is not None
    key = (lambda row: [row.values.get(name) for name in columns]) if config.score.needs_groups else None
    return RowSource(data.dataset, data.dataset_split, data.skip_samples, data.max_samples, DATASET, key)
