"""Inspect the first rows of files: whether the flags say where an answer begins, and how messages become text."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from rlhf_suite.config.check.problems import Problem
from rlhf_suite.config.check.sources import first_columns, first_row, is_glob, match_files, names_in
from rlhf_suite.config.declarations.benchmarks import BENCHMARKS, named_benchmarks
from rlhf_suite.config.declarations.data import DataConfig
from rlhf_suite.config.declarations.runs import Run
from rlhf_suite.config.declarations.task_groups import LOOPS, SAMPLING, SUPERVISED, TRAINING, WITH_ANSWERS
from rlhf_suite.config.rules.data import benchmark_of

TEMPLATE = "data.apply_chat_template"


def answers_are_named(run: Run, folder: Path | None) -> Iterator[Problem]:
    """Yield a problem if nothing says where an answer begins: it has no column of its own, and is not the last turn of
    messages or of a dialogue."""
    if run.task not in WITH_ANSWERS or pretrains(run):
        return
    data: Any = run.data
    if data.output_key is not None or getattr(data, "chosen_key", None) is not None or data.turn_markers is not None:
        return
    files = files_of(data.dataset)
    texts = [file for file in files if isinstance(value_in(file, data.input_key), str)]
    if data.apply_chat_template and (data.row_format is not None or not texts):
        return
    columns = first_columns(files[0]) if files and data.row_format is None else None
    key = f"data.output_key=<{'one of ' + ', '.join(columns) if columns else 'column'}>"
    if data.apply_chat_template:
        problem = f"the column of the answer is not named, and {data.input_key!r} of {texts[0]} is text, not messages"
        yield Problem("data.output_key", problem, f"add {key}, or data.turn_markers if a text holds a whole dialogue")
        return
    problem = "the column of the answer is not set, and nothing marks where in data.input_key it begins"
    fix = f"add {key}; or {TEMPLATE}=true for message lists, data.turn_markers for dialogues in one text"
    yield Problem("data.output_key", problem, fix)


def messages_are_rendered(run: Run, folder: Path | None) -> Iterator[Problem]:
    """Yield a problem if a column of the first row holds messages, and no chat template makes text of them."""
    data: Any = getattr(run, "data", None)
    if run.task not in (*TRAINING, "generate") or data.apply_chat_template or pretrains(run):
        return
    if getattr(data, "row_format", None) is not None:
        return
    for key, dataset, own in sources_of(run):
        for flag in text_flags(data):
            column = own.get(flag, getattr(data, flag))
            for file in files_of(dataset) if column is not None else ():
                if holds_messages(value_in(file, column)):
                    problem = (
                        f"column {column!r} of {file} ({key}) holds messages, and no chat template makes text of them"
                    )
                    named = f"{'eval' if flag in own else 'data'}.{flag}=<column>"
                    yield Problem(TEMPLATE, problem, f"add {TEMPLATE}=true, or name a column of text: {named}")
                    return


def benchmarks_exist(run: Run, folder: Path | None) -> Iterator[Problem]:
    """Yield a problem for each file of a benchmark that is not there, and for packages that its rule needs."""
    if run.task not in SAMPLING:
        return
    key, named = benchmark_of(run)
    for name, place in named_benchmarks(named):
        if name in BENCHMARKS and place and not Path(place).exists():
            fix = f"get {BENCHMARKS[name].source}, and name its .jsonl or .parquet file or their folder"
            yield Problem(key, f"{name}: the file or folder {place} does not exist", fix)
        packages = BENCHMARKS[name].packages if name in BENCHMARKS else ()
        if missing := [package for package in packages if find_spec(package) is None]:
            yield Problem(key, f"{name} needs {' and '.join(missing)}", f"pip install 'rlhf_suite[{name}]'")


def sources_of(run: Any) -> Iterator[tuple[str, str | None, dict[str, str]]]:
    """Yield the flag of each source of rows, the source, and the columns that an evaluation set calls otherwise."""
    trains = "dataset" if run.task in SUPERVISED else "prompt_dataset"
    yield f"data.{trains}", getattr(run.data, trains), {}
    if run.task in LOOPS:
        own = {"input_key": run.eval.input_key} if run.eval.input_key is not None else {}
        yield "eval.dataset", run.eval.dataset, own
    elif not run.has("generate"):
        names = names_in(run.eval.dataset)
        yield from (("eval.dataset", *name) for name in zip(names, run.eval.columns_of_sets(len(names)), strict=True))


def text_flags(data: DataConfig) -> tuple[str, ...]:
    """Return the flags that name the columns from which text is made."""
    if data.is_paired:
        return ("prompt_key", "chosen_key", "rejected_key")
    return ("input_key", "output_key") if data.has("output_key") else ("input_key",)


def pretrains(run: Run) -> bool:
    """Return whether a run trains on every token of a text, which has no answer."""
    return run.has("actor") and run.actor.pretrains


def files_of(dataset: str | None) -> list[Path]:
    """Return the files of a comma list of sources, of a pattern the first; other sources are not looked into."""
    names = names_in(dataset)
    files = [match_files(name)[:1] if is_glob(name) else [Path(name)] for name in names]
    return [path for paths in files for path in paths if path.is_file()]


def value_in(file: Path, column: str) -> object:
    """Return the value of a column in the first row of a file; None if it is not known."""
    return (first_row(file) or {}).get(column)


def holds_messages(value: object) -> bool:
    """Return whether a value is a list of messages."""
    return isinstance(value, list) and bool(value) and isinstance(value[0], dict)


ROWS = (answers_are_named, messages_are_rendered, benchmarks_exist)
