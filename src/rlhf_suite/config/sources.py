"""Data sources seen from outside: whether they exist, and whether the first row of a file has the columns."""

from __future__ import annotations

import csv
import glob
import gzip
import json
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields
from importlib.util import find_spec
from pathlib import Path
from typing import IO, TYPE_CHECKING

from rlhf_suite.config.data import LabelledDataConfig, PromptTextConfig
from rlhf_suite.config.eval import EvalConfig
from rlhf_suite.config.models import SFTActorConfig
from rlhf_suite.config.problems import Problem, rule

if TYPE_CHECKING:
    from rlhf_suite.config.runs import (
        CheckRewardRun,
        DistillRun,
        GenerateRun,
        KTORun,
        PPORun,
        ScoreRun,
        SFTRun,
        SupervisedRun,
    )


TEXT_SUFFIXES, GZIP = (".json", ".jsonl", ".csv", ".tsv", ".txt"), ".gz"
SUFFIXES = (*TEXT_SUFFIXES, *(f"{suffix}{GZIP}" for suffix in TEXT_SUFFIXES), ".parquet", ".arrow")
BUILTIN = "builtin:"
GYM, GYM_PACKAGE, GYM_FIX = "reasoning_gym:", "reasoning_gym", "run pip install 'rlhf-suite[gym]'"
PEEK_BYTES = 1 << 20


def source_problems(
    key: str,
    sources: str | None,
    columns: Mapping[str, str],
    probs_key: str = "",
    probs: Sequence[float] | None = None,
) -> Iterator[Problem]:
    """Yield what is wrong with the comma list in flag `key`. `columns`: flags that name columns, and those names."""
    names = [name.strip() for name in (sources or "").split(",") if name.strip()]
    if not names:
        yield Problem(key, "no data is named", f"add {key}=<file, folder, hub name or builtin:<task>>")
        return
    if probs is not None and len(probs) != len(names):
        what = f"{len(probs)} probabilities for {len(names)} sources in {key}"
        yield Problem(probs_key, what, f"write one for each source, e.g. '{probs_key}={even(len(names))}'")
    for name in names:
        yield from one_source_problems(key, name, columns)


def one_source_problems(key: str, name: str, columns: Mapping[str, str]) -> Iterator[Problem]:
    """Yield what is wrong with one source of the list."""
    if name.startswith(GYM):
        yield from gym_problems(key)
    elif is_glob(name):
        yield from glob_problems(key, name, columns)
    elif is_missing(name):
        yield Problem(key, f"there is no file {name} (seen from {Path.cwd()})", "check the path")
    elif Path(name).is_file():
        yield from file_problems(key, Path(name), columns)
    elif Path(name).is_dir() and not any(file_type(path) in SUFFIXES for path in Path(name).rglob("*")):
        yield Problem(key, f"the folder {name} has no data files", f"known types are {', '.join(SUFFIXES)}")


def evaluation_problems(config: EvalConfig, columns: Mapping[str, str]) -> Iterator[Problem]:
    """Yield what is wrong with the sources of eval.dataset. `columns`: flags that name columns of the training data,
    and those names."""
    if config.dataset is None:
        return
    sources = [name.strip() for name in config.dataset.split(",") if name.strip()]
    uneven = {name: given for name, given in config.column_flags().items() if len(given) not in (1, len(sources))}
    for name, given in uneven.items():
        what = f"{len(given)} columns for {len(sources)} sources in eval.dataset"
        yield Problem(f"eval.{name}", what, "write one for all of them, or one for each")
    if uneven or not sources:
        yield from source_problems("eval.dataset", config.dataset, {})
        return
    for source, own in zip(sources, config.columns_of_sets(len(sources)), strict=True):
        others = {flag: column for flag, column in columns.items() if flag.removeprefix("data.") not in own}
        named = {f"eval.{name}": column for name, column in own.items()}
        yield from source_problems("eval.dataset", source, others | named)


def gym_problems(key: str) -> Iterator[Problem]:
    """Yield a problem where the package that `key` needs is not installed."""
    if find_spec(GYM_PACKAGE) is None:
        yield Problem(key, "the package reasoning-gym is not installed", GYM_FIX)


def file_type(path: Path) -> str:
    """Return the end of a file's name in lower case: `.jsonl`, or `.jsonl.gz` where it is compressed."""
    suffix = path.suffix.lower()
    return path.with_suffix("").suffix.lower() + GZIP if suffix == GZIP else suffix


def is_glob(name: str) -> bool:
    """Return whether a source is a pattern such as `data/*.jsonl`, and not the name of a file that exists."""
    return glob.has_magic(name) and not name.startswith((BUILTIN, GYM)) and not Path(name).exists()


def matching_files(pattern: str) -> list[Path]:
    """Return the files that match a pattern, sorted; `**` goes through folders of any depth."""
    found = glob.glob(pattern, recursive=True)  # noqa: PTH207 - Path.glob takes no absolute patterns
    return sorted(path for path in map(Path, found) if path.is_file())


def glob_problems(key: str, pattern: str, columns: Mapping[str, str]) -> Iterator[Problem]:
    """Yield what is wrong with a pattern, or with the columns of the files that match it."""
    files = matching_files(pattern)
    if not files:
        yield Problem(key, f"no file matches {pattern} (seen from {Path.cwd()})", "check the path")
    for file in files:
        if file_type(file) not in SUFFIXES:
            what = f"{pattern} also matches {file}, which is not a data file"
            yield Problem(key, what, f"write a pattern that ends in one of {', '.join(SUFFIXES)}")
            return
    for file in files[:1]:
        yield from column_problems(file, columns)


def even(count: int) -> str:
    return f"[{','.join([f'{1 / count:.3g}'] * count)}]"


def is_missing(name: str) -> bool:
    """Return whether a source is a path that does not exist. A plain word or `owner/name` may be on the hub."""
    if name.startswith(BUILTIN) or Path(name).exists():
        return False
    base = Path(name.partition("@")[0])
    return file_type(base) in SUFFIXES or (name.startswith(("/", ".", "~")) and not base.exists())


def file_problems(key: str, path: Path, columns: Mapping[str, str]) -> Iterator[Problem]:
    """Yield what is wrong with a file of rows: its type, or its columns."""
    if file_type(path) in SUFFIXES:
        yield from column_problems(path, columns)
    else:
        yield Problem(key, f"{path} is not of a known type", f"give a file that ends in one of {', '.join(SUFFIXES)}")


def hub_names(sources: str | None) -> list[str]:
    """Return the names of a comma list that can only be on the hub."""
    names = [name.strip() for name in (sources or "").split(",") if name.strip()]
    here = (BUILTIN, GYM)
    return [
        name
        for name in names
        if not (name.startswith(here) or is_glob(name) or is_missing(name))
        and not Path(name).exists()
        and not Path(name.partition("@")[0]).exists()
    ]


def column_problems(path: Path, columns: Mapping[str, str]) -> Iterator[Problem]:
    """Yield the columns that the first row does not have; files that cannot be read quickly are not checked."""
    if path.stat().st_size == 0:
        yield Problem(str(path), "is empty", "give a file with at least one row")
        return
    first = first_columns(path)
    if first is None:
        return
    for flag, column in columns.items():
        parts = [column] if column in first else [part.strip() for part in column.split(",")]
        for missing in (part for part in parts if part not in first):
            yield Problem(flag, f"{path} has no column {missing!r}", f"write {flag}=<one of {', '.join(first)}>")


def first_columns(path: Path) -> list[str] | None:
    """Return the columns of the first row of a JSON, JSON lines, CSV or text file; None for others."""
    kind = file_type(path).removesuffix(GZIP)
    try:
        if kind == ".txt":
            return ["text"]
        if kind in (".csv", ".tsv"):
            with opened_text(path) as file:
                return next(csv.reader(file, delimiter="\t" if kind == ".tsv" else ","), None)
        if kind in (".json", ".jsonl"):
            with opened_text(path) as file:
                return first_json_columns(file.read(PEEK_BYTES).lstrip())
        if kind == ".parquet":
            from pyarrow.parquet import read_schema

            return list(read_schema(path).names)
    except (ValueError, OSError, EOFError, zlib.error, csv.Error):
        return None
    return None


def opened_text(path: Path) -> IO[str]:
    """Open a file as text, and decompress it."""
    if path.suffix.lower() == GZIP:
        return gzip.open(path, "rt", newline="", encoding="utf-8-sig")
    return path.open(newline="", encoding="utf-8-sig")


def first_json_columns(text: str) -> list[str] | None:
    """Return the keys of the first object: of a list, of {"data": [...]}, or of one object per line."""
    if text.startswith("["):
        text = text[1:].lstrip()
    values, _ = json.JSONDecoder().raw_decode(text)
    if isinstance(values, dict) and isinstance(values.get("data"), list):
        values = values["data"][0] if values["data"] else None
    return list(values) if isinstance(values, dict) else None


OF_SINGLE_ANSWERS = ("data.input_key", "data.output_key", "data.label_key")  # flags of task=kto without pairs


def columns(run: SupervisedRun) -> dict[str, str]:
    """Return the flags that name columns of this run's data, and those names."""
    if run.data.row_format is not None:
        return {}  # of rows as they become
    names = [field.name for field in fields(run.data) if field.name.endswith("_key")]
    keys = {f"data.{name}": getattr(run.data, name) for name in names}
    if isinstance(run.data, LabelledDataConfig) and run.data.chosen_key is not None:
        keys = {flag: column for flag, column in keys.items() if flag not in OF_SINGLE_ANSWERS}
    if isinstance(run.actor, SFTActorConfig) and run.actor.pretrain_mode_enable:
        keys = {"data.input_key": keys["data.input_key"]}
    return {flag: column for flag, column in keys.items() if column is not None}


@rule
def has_training_data(run: SupervisedRun) -> Iterator[Problem]:
    data, names = run.data, columns(run)
    yield from source_problems("data.dataset", data.dataset, names, "data.dataset_probs", data.dataset_probs)
    yield from evaluation_problems(run.eval, names)


@rule
def pairs_are_whole(run: KTORun) -> Iterator[Problem]:
    if run.data.chosen_key is None:
        return
    data = run.data
    if data.rejected_key is None:
        yield Problem(
            "data.rejected_key", "only the better answer of each pair is named", "add data.rejected_key=rejected"
        )
    if data.prompt_key is None and data.turn_markers is None and not data.apply_chat_template:
        what = "the prompt of the pairs is not named, so it cannot be separated from the answers"
        fix = "add data.prompt_key=<column>, data.turn_markers or data.apply_chat_template=true"
        yield Problem("data.prompt_key", what, fix)


@rule
def full_rows_are_not_padded(run: SFTRun | DistillRun) -> Iterator[Problem]:
    if run.data.pack_to_max_len and not run.ds.packing_samples:
        what = "the examples of a row would be padded to one another, each to the longest"
        yield Problem("data.pack_to_max_len", what, "add ds.packing_samples=true")


def prompt_columns(data: PromptTextConfig) -> dict[str, str]:
    """Return the flags that name columns of prompts, and the columns."""
    named = {"data.input_key": data.input_key, "data.label_key": data.label_key, "data.tools_key": data.tools_key}
    named["data.reward_columns"] = ",".join(data.reward_columns) or None
    return {flag: column for flag, column in named.items() if column is not None}


@rule
def has_prompts(run: PPORun) -> Iterator[Problem]:
    data = run.data
    columns = prompt_columns(data) if data.row_format is None else {}
    yield from source_problems(
        "data.prompt_dataset", data.prompt_dataset, columns, "data.prompt_probs", data.prompt_probs
    )
    yield from evaluation_problems(run.eval, columns)
    if run.eval.dataset is not None and run.eval.steps == -1:
        yield Problem("eval.steps", "eval.dataset is set, but never used", "add eval.steps=<every so many steps>")


@rule
def has_prompts_to_answer(run: GenerateRun) -> Iterator[Problem]:
    yield from source_problems("data.prompt_dataset", run.data.prompt_dataset, prompt_columns(run.data))


@rule
def has_rows(run: ScoreRun | CheckRewardRun) -> Iterator[Problem]:
    data = run.data
    given = {"data.input_key": data.input_key, "data.output_key": data.output_key, "data.label_key": data.label_key}
    given["data.reward_columns"] = ",".join(data.reward_columns) or None
    keys = {flag: column for flag, column in given.items() if column is not None}
    yield from source_problems("data.dataset", run.data.dataset, keys)
