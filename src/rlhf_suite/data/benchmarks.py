"""The questions of a benchmark, read from local files of its data set and encoded as prompts."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlhf_suite.config.declarations.benchmarks import BENCHMARKS, Benchmark, fingerprint, named_benchmarks
from rlhf_suite.config.declarations.data import DataConfig
from rlhf_suite.config.declarations.eval import EvalConfig
from rlhf_suite.data.row import Row, RowError
from rlhf_suite.data.sources import SourceFlags, limit_rows, locate
from rlhf_suite.data.text_encoders import Prompt, PromptEncoder
from rlhf_suite.errors import UserError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

FLAGS = SourceFlags("eval.benchmark", "the split of the benchmark")


@dataclass(frozen=True)
class Questions:
    """A benchmark, its questions in the order of the file, and a digest of all that its numbers depend on."""

    name: str
    benchmark: Benchmark
    prompts: Sequence[Prompt]
    fingerprint: str


def load_benchmarks(config: EvalConfig, data: DataConfig, tokenizer: PreTrainedTokenizerBase) -> list[Questions]:
    """Read the benchmarks of eval.benchmark. The chat template is that of the run, or none.

    Raises:
        UserError: a file cannot be read, or a row has no question or answer.
    """
    own = replace(data, input_key="prompt", label_key="label", input_template=None, reward_columns=[])
    encoder = PromptEncoder(tokenizer, own)
    return [
        load_questions(name, place, config.max_samples, encoder) for name, place in named_benchmarks(config.benchmark)
    ]


def load_questions(name: str, place: str, most: int | None, encoder: PromptEncoder) -> Questions:
    """Read the first `most` questions (None: all) of a benchmark from a file or folder."""
    benchmark = BENCHMARKS[name]
    if not Path(place).exists():
        raise UserError(f"eval.benchmark={name}:{place}: there is no such file or folder; get {benchmark.source}")
    rows = limit_rows(locate(place, benchmark.split, FLAGS).rows(), most)
    questions = [*read_questions(benchmark, rows)]
    if not questions:
        raise UserError(f"eval.benchmark={name}:{place}: it has no rows")
    prompts = [
        replace(encoder.encode(row), index=index, source=name)
        for index, row in enumerate(
            Row({"prompt": benchmark.prompt.replace("{question}", question), "label": answer}, row.source, row.line)
            for row, question, answer in questions
        )
    ]
    config = encoder.config
    shown: dict[str, object] = {"chat template": config.apply_chat_template, "longest": config.max_len}
    pairs = [(question, answer) for _, question, answer in questions]
    return Questions(name, benchmark, prompts, fingerprint(benchmark, pairs, shown))


def read_questions(benchmark: Benchmark, rows: Iterator[Row | RowError]) -> Iterator[tuple[Row, str, str]]:
    """Yield each row with its question and its right answer.

    Raises:
        RowError: a row cannot be read, or lacks one of them. A benchmark with fewer questions would be another one.
    """
    for row in rows:
        if isinstance(row, RowError):
            raise row
        yield row, value_of(row, benchmark.question), answer_of(row, benchmark)


def answer_of(row: Row, benchmark: Benchmark) -> str:
    """Return the right answer in a row: that of one column, or of several as a JSON object."""
    if not benchmark.label:
        return value_of(row, benchmark.answer)
    if missing := [name for name in benchmark.label if row.values.get(name) is None]:
        raise RowError(row.where, f"eval.benchmark: no column {missing[0]}")
    return json.dumps({name: without_nulls(row.values[name]) for name in benchmark.label}, default=str)


def without_nulls(value: Any) -> Any:
    """Return a value without the nulls in its objects, which Parquet has and lines of JSON need not have."""
    if isinstance(value, dict):
        return {name: without_nulls(inner) for name, inner in value.items() if inner is not None}
    return [without_nulls(inner) for inner in value] if isinstance(value, list) else value


def value_of(row: Row, columns: Sequence[str]) -> str:
    """Return the first of some columns that a row has, as a text."""
    value = next((row.values[name] for name in columns if row.values.get(name) is not None), None)
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        raise RowError(row.where, f"eval.benchmark: no text or number in the column {' or '.join(columns)}")
    return str(value)
