"""Data sources seen from outside: whether they exist, and whether the first row of a file has the columns."""

from __future__ import annotations

import csv
import glob
import gzip
import json
import re
import zlib
from collections.abc import Iterator, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import IO

from rlhf_suite.config.check.problems import Problem
from rlhf_suite.python_source import SourceError, list_bound_names, parse_file

TEXT_SUFFIXES, GZIP = (".json", ".jsonl", ".csv", ".tsv", ".txt"), ".gz"
SUFFIXES = (*TEXT_SUFFIXES, *(f"{suffix}{GZIP}" for suffix in TEXT_SUFFIXES), ".parquet", ".arrow")
BUILTIN, ROWS = "builtin:", "rows"  # rows: what a Python file makes
GYM, GYM_PACKAGE, GYM_FIX = "reasoning_gym:", "reasoning_gym", "run pip install 'rlhf-suite[gym]'"
PEEK_BYTES = 1 << 20
BETWEEN = re.compile(r"[\s,]*")  # what separates two objects


def names_in(sources: str | None) -> list[str]:
    """Return the entries of a comma list."""
    return [name.strip() for name in (sources or "").split(",") if name.strip()]


def metric_names(sources: Sequence[str]) -> list[str]:
    """Return the name of each source in metrics: the last part of its path, or all of it where two
    would be the same."""
    stems = [Path(source).stem for source in sources]
    return [source if stems.count(stem) > 1 else stem for stem, source in zip(stems, sources, strict=True)]


def source_problems(
    key: str, sources: str | None, columns: Mapping[str, str], probs_key: str = "", probs: Sequence[float] | None = None
) -> Iterator[Problem]:
    """Yield what is wrong with the comma list in flag `key`. `columns`: flags that name columns, and those names."""
    names = names_in(sources)
    if not names:
        yield Problem(key, "no data is named", f"add {key}=<file, folder, hub name or builtin:<task>>")
        return
    if probs is not None and len(probs) != len(names):
        problem = f"{len(probs)} probabilities for {len(names)} sources in {key}"
        yield Problem(probs_key, problem, f"write one for each source, e.g. '{probs_key}={even(len(names))}'")
    for name in names:
        yield from one_source_problems(key, name, columns)


def one_source_problems(key: str, name: str, columns: Mapping[str, str]) -> Iterator[Problem]:
    """Yield what is wrong with one source of the list."""
    if name.startswith(GYM):
        yield from gym_problems(key)
    elif is_python(name):
        yield from python_problems(key, name)
    elif is_glob(name):
        yield from glob_problems(key, name, columns)
    elif is_missing(name):
        yield Problem(key, f"there is no file {name} (seen from {Path.cwd()})", "check the path")
    elif Path(name).is_file() and file_type(Path(name)) in SUFFIXES:
        yield from column_problems(Path(name), columns)
    elif Path(name).is_file():
        yield Problem(key, f"{name} is not of a known type", f"give a file that ends in one of {', '.join(SUFFIXES)}")
    elif Path(name).is_dir() and not any(file_type(path) in SUFFIXES for path in Path(name).rglob("*")):
        yield Problem(key, f"the folder {name} has no data files", f"known types are {', '.join(SUFFIXES)}")


def is_python(name: str) -> bool:
    """Return whether a source is a Python file, which makes its rows itself."""
    return name.endswith(".py")


def python_problems(key: str, name: str) -> Iterator[Problem]:
    """Yield what is wrong with a Python file that makes rows. It is not run."""
    path = Path(name).expanduser()
    if not path.is_file():
        yield Problem(key, f"there is no file {name} (seen from {Path.cwd()})", "check the path")
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
    if find_spec(GYM_PACKAGE) is None:
        yield Problem(key, "the package reasoning-gym is not installed", GYM_FIX)


def file_type(path: Path) -> str:
    """Return the end of a file's name in lower case: `.jsonl`, or `.jsonl.gz` where it is compressed."""
    suffix = path.suffix.lower()
    return path.with_suffix("").suffix.lower() + GZIP if suffix == GZIP else suffix


def is_glob(name: str) -> bool:
    """Return whether a source is a pattern such as `data/*.jsonl`, and not the name of a file that exists."""
    return glob.has_magic(name) and not name.startswith((BUILTIN, GYM)) and not Path(name).exists()


def match_files(pattern: str) -> list[Path]:
    """Return the files that match a pattern, sorted; `**` goes through folders of any depth."""
    paths = glob.glob(pattern, recursive=True)  # noqa: PTH207 - Path.glob takes no absolute patterns
    return sorted(path for path in map(Path, paths) if path.is_file())


def glob_problems(key: str, pattern: str, columns: Mapping[str, str]) -> Iterator[Problem]:
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


def even(count: int) -> str:
    return f"[{','.join([f'{1 / count:.3g}'] * count)}]"


def is_missing(name: str) -> bool:
    """Return whether a source is a path that does not exist. A plain word or `owner/name` may be on the hub."""
    if name.startswith(BUILTIN) or Path(name).exists():
        return False
    base = Path(name.partition("@")[0])
    return file_type(base) in SUFFIXES or (name.startswith(("/", ".", "~")) and not base.exists())


def hub_names(sources: str | None) -> list[str]:
    """Return the names of a comma list that can only be on the hub."""
    return [
        name
        for name in names_in(sources)
        if not (name.startswith((BUILTIN, GYM)) or is_python(name) or is_glob(name) or is_missing(name))
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
            with open_text(path) as file:
                return next(csv.reader(file, delimiter="\t" if kind == ".tsv" else ","), None)
        if kind in (".json", ".jsonl"):
            with open_text(path) as file:
                return first_json_columns(file.read(PEEK_BYTES).lstrip())
        if kind == ".parquet":
            from pyarrow.parquet import read_schema

            return list(read_schema(path).names)
    except (ValueError, OSError, EOFError, zlib.error, csv.Error):
        return None
    return None


def first_row(path: Path) -> dict[str, object] | None:
    """Return the first row of a file of JSON, JSON lines, CSV or text; None for others. Cells of CSV are texts."""
    kind = file_type(path).removesuffix(GZIP)
    try:
        if kind in (".json", ".jsonl"):
            with open_text(path) as file:
                text = file.read(PEEK_BYTES).lstrip()
            value = json.JSONDecoder().raw_decode(text.removeprefix("[").lstrip())[0]
            rows = value.get("data") if isinstance(value, dict) else None
            row = rows[0] if isinstance(rows, list) and rows else value
            return row if isinstance(row, dict) else None
    except (ValueError, OSError, EOFError, RecursionError, zlib.error):
        return None
    is_text = kind in (".csv", ".tsv", ".txt")
    return dict.fromkeys(first_columns(path) or (), "text") if is_text else None


def open_text(path: Path) -> IO[str]:
    """Open a file as text, and decompress it."""
    if path.suffix.lower() == GZIP:
        return gzip.open(path, "rt", newline="", encoding="utf-8-sig")
    return path.open(newline="", encoding="utf-8-sig")


def first_json_columns(text: str) -> list[str] | None:
    """Return the keys of the objects at the beginning of a file: of a list, of {"data": [...]}, or of one object per
    line. The text may end within an object, but not within the first."""
    decoder, keys, place = json.JSONDecoder(), dict[str, None](), 0
    if text.startswith("["):
        text = text[1:].lstrip()
    while place < len(text):
        try:
            values, place = decoder.raw_decode(text, place)
        except ValueError:
            if not keys:
                raise
            break
        rows = values["data"] if isinstance(values, dict) and isinstance(values.get("data"), list) else [values]
        if not keys and not (rows and isinstance(rows[0], dict)):
            return None
        keys |= dict.fromkeys(key for row in rows if isinstance(row, dict) for key in row)
        place = BETWEEN.match(text, place).end()  # type: ignore[union-attr]
    return list(keys) or None
