"""Data sources seen from outside: whether they exist, and whether the first row of a file has the columns."""

from __future__ import annotations

import csv
import glob
import gzip
import json
import re
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import IO

TEXT_SUFFIXES, GZIP = (".json", ".jsonl", ".csv", ".tsv", ".txt"), ".gz"
SUFFIXES = (*TEXT_SUFFIXES, *(f"{suffix}{GZIP}" for suffix in TEXT_SUFFIXES), ".parquet", ".arrow")
BUILTIN, ROWS = "builtin:", "rows"  # rows: what a Python file makes
GYM = "reasoning_gym:"
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


def is_python(name: str) -> bool:
    """Return whether a source is a Python file, which makes its rows itself."""
    return name.endswith(".py")


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


def list_data_files(folder: Path) -> list[Path]:
    """Return the data files in a folder and the folders in it, sorted. Like those of a pattern they are files, of which
    none is hidden: tools keep what is not data under names that begin with a dot."""
    return sorted(
        path
        for path in folder.rglob("*")
        if file_type(path) in SUFFIXES
        and path.is_file()
        and not any(part.startswith(".") for part in path.relative_to(folder).parts)
    )


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
