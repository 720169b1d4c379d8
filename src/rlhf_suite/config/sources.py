"""Data sources seen from outside: whether they exist, and whether the first row of a text file has the columns."""

from __future__ import annotations

import csv
import json
from collections.abc import Iterator, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path

from rlhf_suite.config.problems import Problem

SUFFIXES = (".json", ".jsonl", ".csv", ".tsv", ".parquet", ".arrow", ".txt")
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
    """What is wrong with the comma list in flag `key`. `columns` maps the flags that name columns to those names."""
    names = [name.strip() for name in (sources or "").split(",") if name.strip()]
    if not names:
        yield Problem(key, "no data is named", f"add {key}=<file, folder, hub name or builtin:<task>>")
        return
    if probs is not None and len(probs) != len(names):
        what = f"{len(probs)} probabilities for {len(names)} sources in {key}"
        yield Problem(probs_key, what, f"write one for each source, e.g. '{probs_key}={even(len(names))}'")
    for name in names:
        if name.startswith(GYM):
            yield from gym_problems(key)
        elif is_missing(name):
            yield Problem(key, f"there is no file {name} (seen from {Path.cwd()})", "check the path")
        elif Path(name).is_file():
            yield from column_problems(Path(name), columns)


def gym_problems(key: str) -> Iterator[Problem]:
    """Whether the package that `key` needs is there."""
    if find_spec(GYM_PACKAGE) is None:
        yield Problem(key, "the package reasoning-gym is not installed", GYM_FIX)


def even(count: int) -> str:
    return f"[{','.join([f'{1 / count:.3g}'] * count)}]"


def is_missing(name: str) -> bool:
    """A path that is not there. A plain word or `owner/name` may be on the hub."""
    if name.startswith(BUILTIN) or Path(name).exists():
        return False
    base = Path(name.partition("@")[0])
    return base.suffix.lower() in SUFFIXES or (name.startswith(("/", ".", "~")) and not base.exists())


def column_problems(path: Path, columns: Mapping[str, str]) -> Iterator[Problem]:
    """Columns that the first row does not have; nothing is said about files that cannot be peeked into."""
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
    """The columns of the first row of a JSON, JSON lines, CSV or text file; None for others and unreadable rows."""
    try:
        if path.suffix.lower() == ".txt":
            return ["text"]
        if path.suffix.lower() in (".csv", ".tsv"):
            with path.open(newline="", encoding="utf-8-sig") as file:
                return next(csv.reader(file, delimiter="\t" if path.suffix.lower() == ".tsv" else ","), None)
        if path.suffix.lower() in (".json", ".jsonl"):
            with path.open(encoding="utf-8-sig") as file:
                return first_json_columns(file.read(PEEK_BYTES).lstrip())
    except (ValueError, OSError, csv.Error):
        return None
    return None


def first_json_columns(text: str) -> list[str] | None:
    """The keys of the first object: of a list, of {"data": [...]}, or of one object per line."""
    if text.startswith("["):
        text = text[1:].lstrip()
    values, _ = json.JSONDecoder().raw_decode(text)
    if isinstance(values, dict) and isinstance(values.get("data"), list):
        values = values["data"][0] if values["data"] else None
    return list(values) if isinstance(values, dict) else None
