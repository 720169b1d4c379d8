"""Readers of data files: they yield a `Row` for each good row and a `RowError` for each malformed one.

One broken line costs one row. Text files may be compressed with gzip.
"""

from __future__ import annotations

import csv
import gzip
import io
import json
import re
import zlib
from codecs import BOM_UTF8
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, cast

from rlhf_suite.config.check.sources import GZIP, file_type
from rlhf_suite.data.arrow_rows import Change, apply_changes, changes, check_offsets, integer_columns
from rlhf_suite.data.row import HALF, Row, RowError
from rlhf_suite.errors import UserError

if TYPE_CHECKING:
    import pyarrow

SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")  # half of a surrogate pair, which json.loads accepts without the other
# Raised where Arrow has a value that Python cannot hold: text that is not UTF-8, or a date after the year 9999.
UNKNOWN_TO_PYTHON = (ValueError, OverflowError)
TEXT_BYTES = 1 << 20  # a row of a text file ends at the first line end after this many bytes


def read_file(path: Path) -> Iterator[Row | RowError]:
    """Yield the rows of a file whose type is in READERS."""
    kind = file_type(path)
    try:
        yield from READERS[kind](path)
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise UserError(f"{path}: not a whole gzip file: {error}") from None


def num_rows(path: Path) -> int | None:
    """Return about how many rows a file has, without reading them as rows: the metadata say it, or the ends of lines,
    which texts in quotes may have too. None where neither does, and for a file that cannot be read."""
    kind = file_type(path)
    with suppress(OSError, EOFError, ValueError, zlib.error):  # whoever reads the rows says what is wrong
        if kind == ".parquet":
            from pyarrow.parquet import ParquetFile

            return int(ParquetFile(path).metadata.num_rows)
        if kind.removesuffix(GZIP) in (".jsonl", ".csv", ".tsv"):
            with _open(path) as file:
                return sum(block.count(b"\n") for block in iter(partial(file.read, 1 << 20), b""))
    return None


def _open(path: Path) -> BinaryIO:
    """Open a file for reading, decompressed."""
    return cast("BinaryIO", gzip.open(path)) if path.suffix.lower() == GZIP else path.open("rb")


def _read_jsonl(path: Path) -> Iterator[Row | RowError]:
    with _open(path) as file:
        yield from _json_lines(path, file)


def _json_lines(path: Path, lines: Iterable[bytes]) -> Iterator[Row | RowError]:
    """Yield a row per line of JSON."""
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        row = Row({}, str(path), number)
        try:
            values = parse_json(line.decode("utf-8-sig" if number == 1 else "utf-8"))
        except (ValueError, RecursionError) as error:
            yield RowError(row.where, _json_problem(error))
        else:
            yield _object(values, row, bool(SURROGATE.search(line)))


def _json_problem(error: ValueError | RecursionError) -> str:
    """Return what is wrong with a line that `parse_json` cannot read."""
    match error:
        case UnicodeDecodeError():
            return "not UTF-8"
        case TwoOfOneKeyError():
            return str(error)
        case json.JSONDecodeError():
            return f"not JSON: {error.msg}"
        case RecursionError():
            return "cannot be read as JSON: it is nested too deeply"
    return "cannot be read as JSON: a number has too many digits"  # more than Python converts


class TwoOfOneKeyError(ValueError):
    """An object of JSON has a key twice, so that one of its two values would be lost."""


def parse_json(text: str) -> Any:
    """Return the value of a text of JSON; raise ValueError where it is none, TwoOfOneKeyError where values would be
    lost, and RecursionError where it is nested too deeply."""
    return json.loads(text, object_pairs_hook=_to_object)


def _to_object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(pairs)
    if len(values) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise TwoOfOneKeyError(f"an object has the key {twice!r} {names.count(twice)} times")
    return values


def _object(values: Any, row: Row, may_be_broken: bool) -> Row | RowError:
    """Return the row of a JSON value. `may_be_broken`: an escape in it may be half of a surrogate pair."""
    if not isinstance(values, dict):
        return RowError(row.where, f"a JSON {type(values).__name__}, not an object of columns")
    if may_be_broken:
        try:
            json.dumps(values, ensure_ascii=False).encode()
        except UnicodeEncodeError:
            return RowError(row.where, HALF)
    return Row(values, row.source, row.line)


def _read_json(path: Path) -> Iterator[Row | RowError]:
    """Yield the rows of a JSON list of objects or of {"data": [...]}; any other content is read as one
    object per line."""
    with _open(path) as file:
        content = file.read().removeprefix(BOM_UTF8)
    try:
        values = _whole_json(content.decode())
    except UnicodeDecodeError as error:
        raise UserError(f"{path}: not UTF-8 (byte {error.start})") from None
    except json.JSONDecodeError as error:
        if not content.lstrip().startswith(b"{"):
            raise UserError(f"{path}:{error.lineno}:{error.colno}: not JSON: {error.msg}") from None
        yield from _json_lines(path, content.splitlines())
        return
    except (RecursionError, ValueError) as error:  # nested too deeply, or an integer with too many digits
        raise UserError(f"{path}: cannot be read as JSON: {error}") from None
    if isinstance(values, dict) and isinstance(values.get("data"), list):
        values = values["data"]
    may_be_broken = bool(SURROGATE.search(content))
    for number, value in enumerate(values if isinstance(values, list) else [values], start=1):
        yield _object(value, Row({}, str(path), number), may_be_broken)


def _whole_json(text: str) -> Any:
    """Do as `parse_json` does; of a text that is no JSON as a whole, say that first."""
    try:
        return parse_json(text)
    except TwoOfOneKeyError:
        json.loads(text)
        raise


def _read_csv(path: Path, delimiter: str = ",") -> Iterator[Row | RowError]:
    """Yield the rows of a file of comma-separated values (.tsv: tabs). The first line names the columns; values are
    strings."""
    csv.field_size_limit(2**31 - 1)  # the default refuses a field of 128 KiB
    with io.TextIOWrapper(_open(path), "utf-8-sig", "surrogateescape", newline="") as file:
        reader = csv.reader(file, delimiter=delimiter, strict=True)
        header = _csv_header(path, reader)
        while True:
            where = Row({}, str(path), reader.line_num + 1)
            try:
                fields = next(reader)
                "".join(fields).encode()
            except StopIteration:
                return
            except csv.Error as error:
                yield RowError(where.where, f"not CSV: {error}")
            except UnicodeEncodeError:
                yield RowError(where.where, "not UTF-8")
            else:
                if len(fields) == len(header):
                    yield Row(dict(zip(header, fields, strict=True)), where.source, where.line)
                elif fields:  # a blank line has no fields
                    yield RowError(where.where, f"{len(fields)} fields where the header has {len(header)}")


def _csv_header(path: Path, reader: Iterator[list[str]]) -> list[str]:
    """Return the names of the columns."""
    try:
        header = next(reader, [])
        "".join(header).encode()
    except csv.Error as error:
        raise UserError(f"{path}:1: the line with the names of the columns is not CSV: {error}") from None
    except UnicodeEncodeError:
        raise UserError(f"{path}:1: the line with the names of the columns is not UTF-8; save it as UTF-8") from None
    check_columns(path, header)
    return header


def check_columns(path: Path, names: Sequence[str]) -> None:
    """Raise UserError where a file has two columns of one name: a row has room for one of them. Columns without a name
    are nobody's."""
    for name in dict.fromkeys(names):
        if name and names.count(name) > 1:
            raise UserError(
                f"{path}: has {names.count(name)} columns that are named {name!r}. Rename or remove all but one"
            )


@contextmanager
def of_arrow(path: str | Path, kind: str) -> Iterator[None]:
    """Turn what pyarrow says of damage, at the beginning or in the middle, into a UserError."""
    from pyarrow import ArrowException

    try:
        yield
    except (ArrowException, OSError) as error:
        raise UserError(f"{path}: not a whole {kind}: {error}") from None


def _read_parquet(path: Path) -> Iterator[Row | RowError]:
    """Yield the rows of a parquet file."""
    from pyarrow.parquet import ParquetFile

    with of_arrow(path, "parquet file"):
        file = ParquetFile(path)
        schema = file.schema_arrow
        check_columns(path, schema.names)

        def column(name: str) -> Iterator[pyarrow.Array]:
            return (batch.column(0) for batch in file.iter_batches(columns=[name]))

        yield from _rows_of(path, file.iter_batches(), changes(schema, integer_columns(schema, column)))


def _read_arrow(path: Path) -> Iterator[Row | RowError]:
    """Yield the rows of an Arrow IPC file or of the stream that `datasets` writes."""
    import pyarrow

    def batches() -> Iterator[pyarrow.RecordBatch]:
        with pyarrow.memory_map(str(path)) as file:
            try:
                yield from pyarrow.ipc.open_stream(file)
            except pyarrow.ArrowInvalid:
                whole = pyarrow.ipc.open_file(file)
                yield from (whole.get_batch(index) for index in range(whole.num_record_batches))

    with of_arrow(path, "arrow file"):
        first = next(batches(), None)
        if first is not None:
            check_columns(path, first.schema.names)
            names = integer_columns(first.schema, lambda name: (batch.column(name) for batch in batches()))
            yield from _rows_of(path, map(check_offsets, batches()), changes(first.schema, names))


def _rows_of(path: Path, batches: Iterable[pyarrow.RecordBatch], how: Mapping[str, Change]) -> Iterator[Row | RowError]:
    """Yield the rows of Arrow batches, with the changes of their columns. Nothing has checked yet that their texts are
    UTF-8, and that Python knows their times."""
    number = 0
    for batch in batches:
        try:
            values: list[dict[str, object] | str] = batch.to_pylist()
        except UNKNOWN_TO_PYTHON:
            values = [_decode(batch.slice(place, 1)) for place in range(batch.num_rows)]
        for number, given in enumerate(values, start=number + 1):  # noqa: B020 - the numbers continue from batch to batch
            row = Row({} if isinstance(given, str) else apply_changes(given, how), str(path), number)
            yield RowError(row.where, given) if isinstance(given, str) else row


def _decode(one: pyarrow.RecordBatch) -> dict[str, object] | str:
    """Return the values of a batch of one row, or what is wrong with one of them."""
    try:
        values: dict[str, object] = one.to_pylist()[0]
    except UNKNOWN_TO_PYTHON as error:
        return unknown_value(error)
    return values


def unknown_value(error: Exception) -> str:
    """Return what is wrong with a row that an error was raised for when its values were decoded."""
    if isinstance(error, UnicodeDecodeError):
        return "not UTF-8"
    if isinstance(error, UNKNOWN_TO_PYTHON):
        return "has a value that Python cannot hold, such as a date after the year 9999"
    return f"an image or another value cannot be decoded ({type(error).__name__})"


def _read_txt(path: Path) -> Iterator[Row | RowError]:
    """Yield the document of a text file in the column `text`.

    A document longer than TEXT_BYTES becomes several rows, cut at line ends, so that no file has to fit into memory.
    """
    with _open(path) as file:
        number, lines, size = 1, [], 0
        for line in chain(file, (b"",)):  # the empty line stands for the end
            lines.append(line)
            size += len(line)
            if not size or (line and size < TEXT_BYTES):
                continue
            row = Row({}, str(path), number)
            number, text, lines, size = number + len(lines), b"".join(lines), [], 0
            try:
                yield Row({"text": text.decode("utf-8-sig" if row.line == 1 else "utf-8")}, row.source, row.line)
            except UnicodeDecodeError:
                yield RowError(row.where, "not UTF-8")


def number_rows(source: str, rows: Iterable[dict[str, object]]) -> Iterator[Row | RowError]:
    """Yield rows with their numbers, from 1."""
    return (Row(values, source, number) for number, values in enumerate(rows, start=1))


Reader = Callable[[Path], Iterator[Row | RowError]]
_TEXT: dict[str, Reader] = {
    ".jsonl": _read_jsonl,
    ".json": _read_json,
    ".csv": _read_csv,
    ".tsv": partial(_read_csv, delimiter="\t"),
    ".txt": _read_txt,
}
READERS: dict[str, Reader] = {
    **_TEXT,
    **{f"{suffix}{GZIP}": reader for suffix, reader in _TEXT.items()},
    ".parquet": _read_parquet,
    ".arrow": _read_arrow,
}
