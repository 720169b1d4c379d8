"""Rows of a program as a file: from lists of dicts, tables (pandas, Polars, PyArrow) and data sets of `datasets`."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Iterator, Mapping
from os import PathLike
from pathlib import Path
from typing import Any

from rlhf_suite.config.check.problems import ConfigurationError
from rlhf_suite.disk import write_text

FORMS = "a list of dicts, a table (pandas, Polars, PyArrow), a data set of `datasets`, or a path"
INDEX = re.compile(r"__index_level_\d+__")  # the index of a table of pandas, where it has no name
ROW = "give each row as a dict, such as {'input': ..., 'output': ...}"


def name_rows(key: str, data: Any, folder: Path) -> str:
    """Write rows to `folder` and return the file's name, which has their hash: the same rows are the same data.

    Raises:
        ConfigurationError: a row is no dict of what JSON has, or there are no rows.
    """
    lines = [line_of(key, number, row) for number, row in enumerate(rows_in(key, data), 1)]
    if not lines:
        raise ConfigurationError.of(key, "there are no rows", f"give {FORMS}")
    written = "".join(lines)
    file = folder / f"rows_{hashlib.sha256(written.encode()).hexdigest()[:12]}.jsonl"
    folder.mkdir(parents=True, exist_ok=True)
    if not file.exists():
        write_text(file, written)
    return str(file)


def are_columns_or_splits(value: Any) -> bool:
    """Return whether a table of names is one of columns or of data sets, and not of flags."""
    if not isinstance(value, Mapping) or not value:
        return False
    scalar = (str, bytes, PathLike, Mapping)
    return all(hasattr(one, "__len__") and not isinstance(one, scalar) for one in value.values())


def rows_in(key: str, data: Any) -> Iterable[Any]:
    """Return the rows of what a call gives as data."""
    if isinstance(data, Mapping):
        names, kind = ", ".join(map(str, data)), type(data).__name__
        if any(hasattr(one, "column_names") or is_table(one) for one in data.values()):
            problem, fix = f"a {kind} has several data sets ({names})", f"give one of them: data[{next(iter(data))!r}]"
        else:
            problem, fix = f"a {kind} with the columns {names} has no rows", f"give {FORMS}"
        raise ConfigurationError.of(key, problem, fix)
    if is_table(data):
        return rows_of_table(key, data)
    if isinstance(data, type | bytes | bytearray) or not (hasattr(data, "__iter__") or hasattr(data, "__getitem__")):
        raise ConfigurationError.of(key, f"a value of type {type(data).__name__} has no rows", f"give {FORMS}")
    rows: Iterable[Any] = data
    return rows


def is_table(data: Any) -> bool:
    """Return whether something is a table of Arrow's interface: of pandas, Polars, PyArrow, DuckDB, ..."""
    return hasattr(data, "__arrow_c_stream__") and not isinstance(data, type)


def rows_of_table(key: str, table: Any) -> Iterator[dict[str, Any]]:
    """Yield the rows of a table, without an index that has no name. What pandas has no value of is None."""
    import pyarrow

    try:
        reader = pyarrow.RecordBatchReader.from_stream(table)
        for batch in reader:
            names = [name for name in batch.schema.names if not INDEX.fullmatch(name)]
            yield from batch.select(names).to_pylist()
    except (pyarrow.ArrowException, TypeError, ValueError) as error:  # such as a column of several types
        kind, said = type(table).__name__, str(error).strip().splitlines()[:1]
        problem = f"the rows of a {kind} cannot be read: {''.join(said)}"
        raise ConfigurationError.of(key, problem, "give a table whose columns have one type each") from None


def line_of(key: str, number: int, row: Any) -> str:
    """Return one row as a line of JSON."""
    if isinstance(row, str) and number == 1:
        fix = f"{ROW}; of several files give one text: 'a.jsonl,b.parquet'"
        raise ConfigurationError.of(key, f"row 1 is the text {row!r:.80}", fix)
    if not isinstance(row, Mapping):
        raise ConfigurationError.of(key, f"row {number} is a {type(row).__name__}", ROW)
    try:
        line = as_json(dict(row)) + "\n"
        line.encode()
    except (TypeError, ValueError, RecursionError):
        problem, fix = next(
            wrong_columns(row), ("has a value that JSON has not", "give texts, numbers, lists and dicts")
        )
        raise ConfigurationError.of(key, f"row {number}: {problem}", fix) from None
    if name := next((name for name in row if not isinstance(name, str)), None):
        raise ConfigurationError.of(key, f"row {number} has a column {name!r}", "give texts as the names of columns")
    return line


def wrong_columns(row: Mapping[Any, Any]) -> Iterator[tuple[str, str]]:
    """Yield what is wrong with each column of a row that is no line of JSON, and the remedy."""
    for name, value in row.items():
        if not isinstance(name, str):
            yield f"has a column {name!r}", "give texts as the names of columns"
        try:
            as_json(value).encode()
        except UnicodeEncodeError:
            yield f"column {name} has half of a surrogate pair", "give texts that UTF-8 has"
        except ValueError:
            yield f"column {name} has NaN or infinity, which is no value", "write None, or leave the row out"
        except TypeError as error:
            yield (
                f"column {name} has a {error}",
                "give texts, numbers, lists and dicts; of an image the path of its file",
            )


def as_json(value: Any) -> str:
    """Return a value as JSON. Raises TypeError with the name of a type that it has not, or ValueError for NaN."""
    return json.dumps(value, ensure_ascii=False, allow_nan=False, default=plain_values)


def plain_values(value: Any) -> Any:
    """Return the number of a scalar, or the list of an array: of NumPy, PyTorch or pandas."""
    if hasattr(value, "tolist"):
        return value.tolist()
    raise TypeError(type(value).__name__)
