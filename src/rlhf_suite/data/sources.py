"""Reading one source: a data file, a folder, one saved by `datasets`, a hub name, tasks built in or of reasoning-gym.

Every reader yields a `Row` per good row and a `RowError` per malformed one, so one broken line costs one row.
"""

from __future__ import annotations

import csv
import json
import re
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from rlhf_suite.config.sources import GYM
from rlhf_suite.data import builtin, gym
from rlhf_suite.data.row import Row, RowError
from rlhf_suite.errors import UserError

if TYPE_CHECKING:
    from datasets import Dataset

SPLITS = ("train", "validation", "valid", "val", "dev", "test", "eval")  # words that mark a file of a folder
HUB_NAME = re.compile(r"\w[\w.-]*(/\w[\w.-]*)?(:[\w.-]+)?")
TEXT_BYTES = 1 << 20  # of a text file that one row holds at least, unless the file ends


class SourceFlags(NamedTuple):
    """The flags that name a source, its split and the mixing weights, for error messages."""

    dataset: str
    split: str
    probs: str = ""


DATASET = SourceFlags("data.dataset", "data.dataset_split", "data.dataset_probs")
PROMPTS = SourceFlags("data.prompt_dataset", "data.prompt_split", "data.prompt_probs")
EVAL = SourceFlags("eval.dataset", "eval.split")


class Located(NamedTuple):
    """A source that was found: its rows, in order, and the files whose contents they are."""

    rows: Callable[[], Iterator[Row | RowError]]
    files: list[Path]


def locate(name: str, split: str, flags: SourceFlags) -> Located:
    """One source. Only sources with several splits look at `split`."""
    if name.startswith(builtin.PREFIX):
        rows = builtin.rows(name, flags.dataset)
        return Located(lambda: _numbered(name, rows), [])
    if name.startswith(GYM):
        task = gym.task_of(name, flags.dataset)
        return Located(lambda: task.rows(name), gym.version_files())
    base, _, data_dir = (name, "", "") if Path(name).exists() else name.partition("@")
    path = Path(base)
    if path.is_file():
        return _files([path], flags)
    if path.is_dir():
        return _folder(path / data_dir, split, flags)
    if path.suffix.lower() in READERS or not HUB_NAME.fullmatch(base):
        raise UserError(f"{flags.dataset}: no file or folder {base!r}; paths are relative to {Path.cwd()}")
    return _hub(base, data_dir, split, flags)


def _files(paths: list[Path], flags: SourceFlags) -> Located:
    unknown = next((path for path in paths if path.suffix.lower() not in READERS), None)
    if unknown is not None:
        raise UserError(f"{flags.dataset}: cannot read {str(unknown)!r}; known file types: {', '.join(READERS)}")
    return Located(lambda: chain.from_iterable(READERS[path.suffix.lower()](path) for path in paths), paths)


def _read_jsonl(path: Path) -> Iterator[Row | RowError]:
    with path.open("rb") as file:
        yield from _json_lines(path, file)


def _json_lines(path: Path, lines: Iterable[bytes]) -> Iterator[Row | RowError]:
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        row = Row({}, str(path), number)
        try:
            values = json.loads(line.decode("utf-8-sig" if number == 1 else "utf-8"))
        except UnicodeDecodeError:
            yield RowError(row.where, "not UTF-8")
        except json.JSONDecodeError as error:
            yield RowError(row.where, f"not JSON: {error.msg}")
        else:
            yield _object(values, row)


def _object(values: Any, row: Row) -> Row | RowError:
    if isinstance(values, dict):
        return Row(values, row.source, row.line)
    return RowError(row.where, f"a JSON {type(values).__name__}, not an object of columns")


def _read_json(path: Path) -> Iterator[Row | RowError]:
    """A list of objects, or {"data": [...]}; anything else in a .json file is one object per line."""
    content = path.read_bytes()
    try:
        values = json.loads(content.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        raise UserError(f"{path}: not UTF-8 (byte {error.start})") from None
    except json.JSONDecodeError as error:
        if not content.lstrip().startswith(b"{"):
            raise UserError(f"{path}:{error.lineno}:{error.colno}: not JSON: {error.msg}") from None
        yield from _json_lines(path, content.splitlines())
        return
    if isinstance(values, dict) and isinstance(values.get("data"), list):
        values = values["data"]
    for number, value in enumerate(values if isinstance(values, list) else [values], start=1):
        yield _object(value, Row({}, str(path), number))


def _read_csv(path: Path, delimiter: str = ",") -> Iterator[Row | RowError]:
    """Separated by commas (.tsv: tabs), first line names the columns; every value is a string."""
    csv.field_size_limit(2**31 - 1)  # the default refuses a document of 128 KiB
    with path.open(newline="", encoding="utf-8-sig", errors="surrogateescape") as file:
        reader = csv.reader(file, delimiter=delimiter, strict=True)
        header = next(reader, [])
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
                elif fields:  # a blank line has none
                    yield RowError(where.where, f"{len(fields)} fields where the header has {len(header)}")


def _read_parquet(path: Path) -> Iterator[Row | RowError]:
    from pyarrow import ArrowInvalid
    from pyarrow.parquet import ParquetFile

    try:
        file = ParquetFile(path)
    except (ArrowInvalid, OSError) as error:
        raise UserError(f"{path}: not a parquet file: {error}") from None
    return _numbered(str(path), (values for batch in file.iter_batches() for values in batch.to_pylist()))


def _read_arrow(path: Path) -> Iterator[Row | RowError]:
    """An IPC file, or the stream that `datasets` writes."""
    import pyarrow

    def values() -> Iterator[dict[str, object]]:
        with pyarrow.memory_map(str(path)) as file:
            try:
                batches: Any = pyarrow.ipc.open_stream(file)
            except pyarrow.ArrowInvalid:
                whole = pyarrow.ipc.open_file(file)
                batches = (whole.get_batch(index) for index in range(whole.num_record_batches))
            for batch in batches:
                yield from batch.to_pylist()

    try:
        yield from _numbered(str(path), values())
    except (pyarrow.ArrowInvalid, OSError) as error:
        raise UserError(f"{path}: not an arrow file: {error}") from None


def _read_txt(path: Path) -> Iterator[Row | RowError]:
    """One document, in the column `text`. One that is longer than TEXT_BYTES comes as several rows, cut at line ends:
    no file has to fit into memory."""
    with path.open("rb") as file:
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


def _numbered(source: str, rows: Iterable[dict[str, object]]) -> Iterator[Row | RowError]:
    return (Row(values, source, number) for number, values in enumerate(rows, start=1))


READERS: dict[str, Callable[[Path], Iterator[Row | RowError]]] = {
    ".jsonl": _read_jsonl,
    ".json": _read_json,
    ".csv": _read_csv,
    ".tsv": partial(_read_csv, delimiter="\t"),
    ".parquet": _read_parquet,
    ".arrow": _read_arrow,
    ".txt": _read_txt,
}


def _folder(folder: Path, split: str, flags: SourceFlags) -> Located:
    """A folder written by `save_to_disk`, or one of data files that are marked with their split or belong to one."""
    if (folder / "dataset_dict.json").is_file() or (folder / "state.json").is_file():
        return _saved(folder, split, flags)
    files = sorted(path for path in folder.rglob("*") if path.suffix.lower() in READERS)
    if not files:
        raise UserError(f"{flags.dataset}: no data files in {str(folder)!r}; known file types: {', '.join(READERS)}")
    words = {path: set(re.split(r"[^a-z0-9]+", str(path.relative_to(folder)).lower())) for path in files}
    found = sorted({word for path in files for word in words[path] & {*SPLITS, split.lower()}})
    if found and split.lower() not in found:
        raise _no_split(str(folder), split, found, flags)
    chosen = [path for path in files if split.lower() in words[path]] if found else files
    return _files(chosen, flags)


def _saved(folder: Path, split: str, flags: SourceFlags) -> Located:
    from datasets import DatasetDict, load_from_disk

    saved = load_from_disk(str(folder))
    if isinstance(saved, DatasetDict):
        if split not in saved:
            raise _no_split(str(folder), split, list(saved), flags)
        saved = saved[split]
    return _of_library(str(folder), saved)


def _hub(name: str, data_dir: str, split: str, flags: SourceFlags) -> Located:
    from datasets import load_dataset

    try:
        path, _, configuration = name.partition(":")
        found = load_dataset(path, configuration or None, data_dir=data_dir or None)
    except (OSError, ValueError, RuntimeError) as error:  # not found, no network, or needs code of its own to run
        raise UserError(
            f"{flags.dataset}: {name!r} is no file or folder here, and as a hub dataset it cannot be loaded: {error}"
        ) from error
    if split not in found:
        raise _no_split(name, split, list(found), flags)
    return _of_library(name, found[split])


def _of_library(name: str, rows: Dataset) -> Located:
    return Located(lambda: _numbered(name, rows), [Path(file["filename"]) for file in rows.cache_files])


def _no_split(source: str, split: str, available: Iterable[str], flags: SourceFlags) -> UserError:
    names = ", ".join(str(name) for name in available)
    return UserError(f"{flags.split}={split}: {source!r} has no such split; available: {names}")
