"""Turn rows with a prompt and a response into rows with scores, by the same sources of reward as rollouts."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from rlhf_suite.config.declarations.data import DataConfig
from rlhf_suite.config.declarations.runs import Run
from rlhf_suite.data.render import columns_text, label_text, text_of
from rlhf_suite.data.row import BadRows, Row, RowError, join_columns, require_value
from rlhf_suite.data.row_range import RowOrError, RowSource
from rlhf_suite.data.sources import DATASET
from rlhf_suite.data.steps import SolutionEncoder
from rlhf_suite.offline.batch_job import Done
from rlhf_suite.offline.responses import ResponseEncoder, has_open_end, reward_query, whole_text
from rlhf_suite.offline.scored_rows import best, pair, with_columns
from rlhf_suite.rewards.base import Sample, Scored
from rlhf_suite.rl.scoring import SampleScorer

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

OPEN_END = "sent to a reward server without the end-of-sequence token of a finished response (data.response_end)"
PROMPT = "prompt"  # the column of task=generate


class Reader(Protocol):
    """Turns rows into the samples that a reward scores."""

    def read(self, row: Row) -> tuple[Sample, str]:
        """Return what the reward reads of a row, and how it is not as the row says, if so; RowError says why the row
        cannot be scored."""
        ...


class TextReader:
    """Reads the text of a row, for a rule, a file or servers."""

    def __init__(self, data: DataConfig, asks_servers: bool) -> None:
        self.data, self.asks_servers = data, asks_servers

    def read(self, row: Row) -> tuple[Sample, str]:
        sample = text_sample(row, self.data, self.data.output_key)
        return sample, OPEN_END if self.asks_servers and has_open_end(row, self.data) else ""


def text_sample(row: Row, data: DataConfig, response_key: str | None) -> Sample:
    """Return what rewards that read text are asked about a row; RowError says why it cannot be scored. Without a column
    of responses the label is taken for one, and it is finished."""
    if response_key is None:
        assert data.label_key is not None, "checked with the flags"
        prompt, response = (label_text(join_columns(row, key)) for key in (data.input_key, data.label_key))
        query = prompt + response + data.response_end
    else:
        prompt, response = (label_text(join_columns(row, key)) for key in (data.input_key, response_key))
        query = reward_query(row, data, prompt, response)
    label = "" if data.label_key is None else label_text(require_value(row, data.label_key))
    columns = json.loads(columns_text(row, data.reward_columns))
    return Sample(query, prompt, response, label, datasource_of(row), columns)


def datasource_of(row: Row) -> str:
    """Return the kind of a row, by which its sources of reward are chosen."""
    source = row.values.get("datasource")
    return "default" if source is None else str(source)


class TokenReader:
    """Reads the tokens that a rollout with the row's response would have, for a reward model."""

    def __init__(self, data: DataConfig, tokenizer: PreTrainedTokenizerBase) -> None:
        self.encoder = ResponseEncoder(tokenizer, data)

    def read(self, row: Row) -> tuple[Sample, str]:
        example = self.encoder.encode(row)
        remark = "cut off at data.max_len" if example.truncated else ""
        return Sample("", "", "", "", datasource_of(row), ids=example.ids), remark


class SolutionReader:
    """Reads prompt and response for a process reward model, the prompt in the model's own template. The prompt of
    `task=generate` is rendered already, and is taken as it is, as rollouts are scored."""

    def __init__(self, data: DataConfig, encoder: SolutionEncoder) -> None:
        self.data, self.encoder = data, encoder

    def read(self, row: Row) -> tuple[Sample, str]:
        prompt = text_of(row, self.data.input_key)
        response = label_text(join_columns(row, self.data.column("output_key")))
        if self.data.input_key != PROMPT or whole_text(row, self.data) is None:
            prompt = self.encoder.render(prompt)
        return Sample("", prompt, response, "", datasource_of(row)), ""


class ScoredChunks:
    """Chunks of rows with their scores."""

    def __init__(self, config: Run, rows: RowSource, reader: Reader, scorer: SampleScorer) -> None:
        self.config, self.rows, self.reader, self.scorer = config, rows, reader, scorer
        self.bad = BadRows(config.data.on_bad_row)

    def score(self, chunks: Iterable[tuple[range, list[RowOrError]]]) -> Iterator[Done]:
        """Yield what is written of each chunk, in order. The rows of a prompt one of whose scores failed are left out
        (reward.on_error=drop)."""
        for numbers, rows in chunks:
            yield self.score_chunk(numbers, rows)

    def score_chunk(self, numbers: range, given: Sequence[RowOrError]) -> Done:
        """Return what is written of a chunk, and sums over it."""
        groups = self.groups(given)
        written: list[dict[str, Any]] = []
        scores: list[float] = []
        outcomes = self.scorer.score_batch([[(row.where, sample) for row, sample in group] for group in groups])
        for group, known in zip(groups, outcomes, strict=True):
            if known is not None:
                of_group = [self.number(outcome) for outcome in known]
                scores += of_group
                written += self.choose_rows([row.values for row, _ in group], known, of_group)
        rows = sum(map(len, groups))
        sums = {
            "rows": rows,
            "skipped": len(given) - rows,
            "written": len(written),
            "scored": len(scores),
            "score": sum(scores),
        }
        return Done(numbers.stop, written, sums)

    def number(self, scored: Scored) -> float:
        """Return the number that is written: of a reward model its standardised score, else what is evaluated."""
        return scored.score if self.config.reward.model_name_or_path is None else scored.reward

    def groups(self, given: Sequence[RowOrError]) -> list[list[tuple[Row, Sample]]]:
        """Return the rows that can be scored with what the reward reads of them, those of one prompt together."""
        groups: list[list[tuple[Row, Sample]]] = []
        is_new = True
        for row, begins in self.rows.with_group_starts(iter(given)):
            is_new = is_new or begins
            try:
                if isinstance(row, RowError):
                    raise row
                sample, remark = self.reader.read(row)
            except RowError as error:
                self.bad.add(error.where or row.where, error.reason)
                continue
            if remark:
                self.bad.note(row.where, remark)
            groups += [[]] if is_new else []
            groups[-1].append((row, sample))
            is_new = False
        return groups

    def choose_rows(
        self, rows: Sequence[dict[str, object]], scored: Sequence[Scored], scores: Sequence[float]
    ) -> Iterator[dict[str, Any]]:
        """Yield what is written of the rows of one prompt."""
        score = self.config.score
        if score.pairs:
            made = pair(rows, scores, self.config.data.column("output_key"))
            if made is not None:
                yield made
            return
        for index in [best(scores)] if score.best_of_n else range(len(rows)):
            steps = {"step_scores": scored[index].steps} if self.config.reward.process.enable else {}
            yield with_columns(rows[index], {"score": scores[index]} | steps)


def row_source(config: Run) -> RowSource:
    """Return the rows of `data.dataset`; those of one prompt, next to each other, belong together."""
    data, columns = config.data, [name.strip() for name in config.data.input_key.split(",")]
    assert data.dataset is not None
    key = (lambda row: [row.values.get(name) for name in columns]) if config.score.needs_groups else None
    return RowSource(data.dataset, data.dataset_split, data.skip_samples, data.max_samples, DATASET, key)
