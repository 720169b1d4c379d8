"""Inspect the sources of rows: they exist, and the first row of a file has the columns that flags name."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

from rlhf_suite.config.check.lacking import REASONING_GYM, find_missing
from rlhf_suite.config.check.problems import Problem
from rlhf_suite.config.check.sources import (
    GYM,
    ROWS,
    SUFFIXES,
    file_type,
    first_columns,
    is_glob,
    is_missing,
    is_python,
    list_data_files,
    match_files,
    names_in,
)
from rlhf_suite.config.declarations.runs import Run
from rlhf_suite.config.declarations.task_groups import LOOPS, RL, SCORED, SUPERVISED
from rlhf_suite.disk import resolve_home
from rlhf_suite.python_source import SourceError, list_bound_names, parse_file

Columns = Mapping[str, str]  # flags that name columns, and those names


def sources_exist(run: Run) -> Iterator[Problem]:
    """Yield what is wrong with each source of rows that a flag names."""
    for key, sources, columns in list_sources(run):
        yield from source_problems(key, sources, columns)


def list_sources(run: Run) -> Iterator[tuple[str, str | None, Columns]]:
    """Yield the flag of each comma list of sources, the list, and the columns that its rows must have."""
    if run.task in SUPERVISED:
        names = columns_of(run.data, ("input_key", "output_key", "label_key") if run.data.is_paired else ())
        if run.actor.pretrains:
            names = {flag: column for flag, column in names.items() if flag == "data.input_key"}
        yield "data.dataset", run.data.dataset, names
        yield from list_evaluation_sets(run, names)
    elif run.task in RL:
        names = columns_of(run.data, ("pretrain_key",))
        yield "data.pretrain_dataset", run.data.pretrain_dataset, {"data.pretrain_key": run.data.pretrain_key}
        yield "data.prompt_dataset", run.data.prompt_dataset, names
        names.pop("data.teacher_prompt_key", None)  # nobody teaches in an evaluation
        yield from list_evaluation_sets(run, names)
    elif run.task == "generate":
        yield "data.prompt_dataset", run.data.prompt_dataset, columns_of(run.data)
    elif run.task in LOOPS:  # its stages have the others
        yield "eval.dataset", run.eval.dataset, columns_of_held_out_prompts(run)
    elif run.task in SCORED:
        yield "data.dataset", run.data.dataset, columns_of(run.data, ("query_key", "finish_key", "tools_key"))


def columns_of_held_out_prompts(run: Run) -> dict[str, str]:
    """Return the columns of the prompts that the stage of an evaluation answers, by the flags of the loop."""
    own = {f"eval.{name}": getattr(run.eval, name) for name in ("input_key", "label_key")}
    own = {flag: column for flag, column in own.items() if column is not None}
    shared = columns_of(run.data.as_of("generate"))
    return {flag: name for flag, name in shared.items() if f"eval.{flag.removeprefix('data.')}" not in own} | own


def list_evaluation_sets(run: Run, columns: Columns) -> Iterator[tuple[str, str | None, Columns]]:
    """Yield the same for each evaluation set, which may call columns otherwise than the training data."""
    sources = names_in(run.eval.dataset)
    if any(len(given) not in (1, len(sources)) for given in run.eval.column_flags().values()):
        yield "eval.dataset", run.eval.dataset, {}  # a rule says so
        return
    for source, own in zip(sources, run.eval.columns_of_sets(len(sources)), strict=True):
        others = {flag: column for flag, column in columns.items() if flag.removeprefix("data.") not in own}
        yield "eval.dataset", source, others | {f"eval.{name}": column for name, column in own.items()}


def columns_of(data: Any, unread: Collection[str] = ()) -> dict[str, str]:
    """Return the flags of the section `data` that name columns of its rows, and those names. Rows may be without those
    of `unread`."""
    if getattr(data, "row_format", None) is not None:
        return {}  # the flags name columns of rows as the function returns them
    names = [field.name for field in fields(data) if field.name.endswith("_key") and field.name not in unread]
    keys = {f"data.{name}": getattr(data, name) for name in names}
    keys["data.reward_columns"] = ",".join(getattr(data, "reward_columns", ())) or None
    return {flag: column for flag, column in keys.items() if column is not None}


def source_problems(key: str, sources: str | None, columns: Columns) -> Iterator[Problem]:
    """Yield what is wrong with the sources of a comma list in flag `key`."""
    for name in names_in(sources):
        yield from one_source_problems(key, name, columns)


def one_source_problems(key: str, name: str, columns: Columns) -> Iterator[Problem]:
    """Yield what is wrong with one source of the list."""
    if name.startswith(GYM):
        yield from gym_problems(key)
    elif is_python(name):
        yield from python_problems(key, name)
    elif is_glob(name):
        yield from glob_problems(key, name, columns)
    elif is_missing(name):
        yield missing_problem(key, name)
    elif Path(name).is_file() and file_type(Path(name)) in SUFFIXES:
        yield from column_problems(Path(name), columns)
    elif Path(name).is_file():
        yield Problem(key, f"{name} is not of a known type", f"give a file that ends in one of {', '.join(SUFFIXES)}")
    elif Path(name).is_dir() and not list_data_files(Path(name)):
        yield Problem(key, f"the folder {name} has no data files", f"known types are {', '.join(SUFFIXES)}")


def missing_problem(key: str, name: str) -> Problem:
    """Return the problem of a path that does not exist, or of an address."""
    if "://" in name:
        return Problem(
            key, f"{name} is an address, but the suite does not download data files", "download it, and give the file"
        )
    return Problem(key, f"the file {name} does not exist (seen from {Path.cwd()})", "check the path")


def python_problems(key: str, name: str) -> Iterator[Problem]:
    """Yield what is wrong with a Python file that makes rows. It is not run."""
    path = resolve_home(name)
    if not path.is_file():
        yield missing_problem(key, name)
        return
    try:
        names = list_bound_names(parse_file(path.resolve()))
    except SourceError as error:
        yield Problem(key, error.what, error.fix)
        return
    if not names & {ROWS, "*"}:
        yield Problem(key, f"{name} has no {ROWS}", f"define {ROWS}(), which returns a list of dicts (docs/data.md)")


def gym_problems(key: str) -> Iterator[Problem]:
    """Yield a problem where the package that `key` needs is not installed."""
    if (problem := find_missing(key, REASONING_GYM)) is not None:
        yield problem


def glob_problems(key: str, pattern: str, columns: Columns) -> Iterator[Problem]:
    """Yield what is wrong with a pattern, or with the columns of the files that match it."""
    files = match_files(pattern)
    if not files:
        yield Problem(key, f"no file matches {pattern} (seen from {Path.cwd()})", "check the path")
    for file in files:
        if file_type(file) not in SUFFIXES:
            problem = f"{pattern} also matches {file}, which is not a data file"
            yield Problem(key, problem, f"write a pattern that ends in one of {', '.join(SUFFIXES)}")
            return
    if files:
        yield from column_problems(files[0], columns)


def column_problems(path: Path, columns: Columns) -> Iterator[Problem]:
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
