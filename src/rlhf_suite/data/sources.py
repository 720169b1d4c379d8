"""The rows that flags name: files, folders, data sets of the hub or saved by `datasets`, built-in
tasks, reasoning-gym."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, TypeGuard

from rlhf_suite.config.check.sources import GYM, ROWS, file_type, is_glob, is_python, list_data_files, match_files
from rlhf_suite.data import builtin, gym
from rlhf_suite.data.arrow_rows import apply_changes, changes, check_offsets, integer_columns
from rlhf_suite.data.files import (
    READERS,
    num_rows,
    number_rows,
    of_arrow,
    read_file,
    unknown_value,
)
from rlhf_suite.data.row import Row, RowError
from rlhf_suite.disk import file_digest, resolve_home
from rlhf_suite.errors import UserError
from rlhf_suite.foreign_text import describe, printable, what_of
from rlhf_suite.python_source import import_file

if TYPE_CHECKING:
    from datasets import Dataset


SPLITS = ("train", "validation", "valid", "val", "dev", "test", "eval")  # words in file names that mean a split
NOT_A_ROW = "not a dict whose keys are the names of columns"
HUB_NAME = re.compile(r"\w[\w.-]*(/\w[\w.-]*)?(:[\w.-]+)?")


class SourceFlags(NamedTuple):
    """The flags that give a source, its split and the mixing probabilities; for error messages."""

    dataset: str
    split: str
    probs: str = ""


DATASET = SourceFlags("data.dataset", "data.dataset_split", "data.dataset_probs")
PROMPTS = SourceFlags("data.prompt_dataset", "data.prompt_split", "data.prompt_probs")
DOCUMENTS = SourceFlags("data.pretrain_dataset", "data.pretrain_split", "data.pretrain_probs")
EVAL = SourceFlags("eval.dataset", "eval.split")


class Located(NamedTuple):
    """A source that was found: its rows, in order, the files that hold them, and about how many there are (None: only
    reading them tells). `digest` is of rows that no file holds."""

    rows: Callable[[], Iterator[Row | RowError]]
    files: list[Path]
    num_rows: Callable[[], int | None]
    digest: str = ""

    @property
    def contents(self) -> list[str]:
        """Return digests that change with the rows."""
        return [*map(file_digest, self.files), *([self.digest] if self.digest else [])]


def locate(name: str, split: str, flags: SourceFlags) -> Located:
    """Find one source. `split` matters only for sources that have several splits.

    Raises:
        UserError: there is no such source, it has no such split, or its files are of an unknown type.
    """
    if name.startswith((builtin.PREFIX, GYM)) or is_python(name):
        return _make_rows(name, flags)
    base, _, data_dir = (name, "", "") if Path(name).exists() else name.partition("@")
    path = Path(base)
    if path.is_file():
        return _files([path], flags)
    if path.is_dir():
        return _folder(path / data_dir, split, flags)
    if is_glob(name):
        paths = match_files(name)
        if not paths:
            raise UserError(f"{flags.dataset}: no file matches {name!r}; paths are relative to {Path.cwd()}")
        return _files(paths, flags)
    if file_type(path) in READERS or not HUB_NAME.fullmatch(base):
        raise UserError(
            f"{flags.dataset}: the file or folder {base!r} does not exist; paths are relative to {Path.cwd()}"
        )
    return _hub(base, data_dir, split, flags)


def _make_rows(name: str, flags: SourceFlags) -> Located:
    """Return rows that code makes: a built-in task, reasoning-gym, or a Python file."""
    if name.startswith(builtin.PREFIX):
        rows = builtin.rows(name, flags.dataset)
        return Located(lambda: number_rows(name, rows), [], lambda: len(rows))
    if is_python(name):
        return _python(name, flags)
    task = gym.task_of(name, flags.dataset)
    return Located(lambda: task.rows(name), gym.version_files(), lambda: len(task.dataset))


def _python(name: str, flags: SourceFlags) -> Located:
    """Return the rows that a Python file makes: those that its function `rows` returns, or its list of that name.

    Raises:
        UserError: there is none, or the file or the function raises an error.
    """
    try:
        made = getattr(import_file(resolve_home(name).resolve()), ROWS)
        rows = [*(made() if callable(made) else made)]
    except Exception as error:
        raise UserError(f"{flags.dataset}={name}: its {ROWS} cannot be read: {describe(error)}") from error
    results = [
        Row(row, name, number) if is_table(row) else RowError(f"{name}:{number}", NOT_A_ROW)
        for number, row in enumerate(rows, start=1)
    ]
    try:
        text = json.dumps([row for row in rows if is_table(row)], sort_keys=True, default=repr)
    except (TypeError, ValueError, RecursionError) as error:
        raise UserError(f"{flags.dataset}={name}: its {ROWS} hold values that JSON cannot hold: {error}") from error
    digest = hashlib.sha256(text.encode()).hexdigest()
    return Located(lambda: iter(results), [], lambda: len(results), digest)


def is_table(row: object) -> TypeGuard[dict[str, object]]:
    """Return whether a row has columns with names."""
    return isinstance(row, dict) and all(isinstance(name, str) for name in row)


def _files(paths: list[Path], flags: SourceFlags) -> Located:
    """Return data files as a source."""
    unknown = next((path for path in paths if file_type(path) not in READERS), None)
    if unknown is not None:
        raise UserError(f"{flags.dataset}: cannot read {str(unknown)!r}; known file types: {', '.join(READERS)}")
    return Located(lambda: chain.from_iterable(map(read_file, paths)), paths, lambda: _together(paths))


def _together(paths: list[Path]) -> int | None:
    """Return about how many rows all files have."""
    counts = [num_rows(path) for path in paths]
    return None if None in counts else sum(filter(None, counts))


def _folder(folder: Path, split: str, flags: SourceFlags) -> Located:
    """Find the files of a folder: one written by `save_to_disk`, or data files, some of which may have a split in their
    path."""
    if (folder / "dataset_dict.json").is_file() or (folder / "state.json").is_file():
        return _load_saved(folder, split, flags)
    files = list_data_files(folder)
    if not files:
        raise UserError(f"{flags.dataset}: no data files in {str(folder)!r}; known file types: {', '.join(READERS)}")
    words = {path: set(re.split(r"[^a-z0-9]+", str(path.relative_to(folder)).lower())) for path in files}
    named_splits = sorted({word for path in files for word in words[path] & {*SPLITS, split.lower()}})
    if named_splits and split.lower() not in named_splits:
        raise _no_split(str(folder), split, named_splits, flags)
    chosen = [path for path in files if split.lower() in words[path]] if named_splits else files
    return _files(chosen, flags)


def _load_saved(folder: Path, split: str, flags: SourceFlags) -> Located:
    """Return a data set written by `save_to_disk` as a source.

    Raises:
        UserError: it has no rows or no such split, or it cannot be read.
    """
    from datasets import DatasetDict, load_from_disk

    try:
        saved = load_from_disk(str(folder))
    except Exception as error:  # of datasets, of pyarrow, or of the disk; an IndexError where nothing was saved
        problem = f"{flags.dataset}: the data set that save_to_disk wrote to {str(folder)!r} cannot be read"
        raise UserError(f"{problem}: {printable(what_of(error))}. Save it again, with at least one row") from error
    if isinstance(saved, DatasetDict):
        if split not in saved:
            raise _no_split(str(folder), split, list(saved), flags)
        saved = saved[split]
    return _of_library(str(folder), saved, flags)


def _hub(name: str, data_dir: str, split: str, flags: SourceFlags) -> Located:
    """Return a data set of the Hugging Face hub as a source."""
    from datasets import load_dataset

    try:
        path, _, configuration = name.partition(":")
        dataset = load_dataset(path, configuration or None, data_dir=data_dir or None)
    except Exception as error:  # not found, no network, files that do not fit together, or it needs to run own code
        raise UserError(
            f"{flags.dataset}: {name!r} is not a file or folder here, and it cannot be loaded from the hub: {error}"
        ) from error
    if split not in dataset:
        raise _no_split(name, split, list(dataset), flags)
    return _of_library(name, dataset[split], flags)


def _of_library(name: str, rows: Dataset, flags: SourceFlags) -> Located:
    """Return a data set of the `datasets` library as a source."""
    rows = rows.with_format(None)  # values of Python, whatever format it was saved with
    files = [Path(file["filename"]) for file in rows.cache_files]
    schema = rows.features.arrow_schema

    def read() -> Iterator[Row | RowError]:
        with of_arrow(name, "data set of save_to_disk"):
            for batch in rows.data.to_batches():
                check_offsets(batch)
        how = changes(schema, integer_columns(schema, lambda column: rows.data.column(column).chunks))
        number = 0
        while number < len(rows):
            try:
                for values in rows.select(range(number, len(rows))):
                    number += 1
                    yield Row(apply_changes(values, how), name, number)
            except ImportError as error:  # a library that decodes sound or videos
                raise UserError(f"{flags.dataset}: {name!r} cannot be read: {error}") from error
            except Exception as error:  # whatever decodes images, sound or dates may raise
                number += 1
                yield RowError(f"{name}:{number}", unknown_value(error))

    return Located(read, files, lambda: len(rows))


def _no_split(source: str, split: str, available: Iterable[str], flags: SourceFlags) -> UserError:
    """Return the error for a split that a source does not have."""
    names = ", ".join(str(name) for name in available)
    return UserError(f"{flags.split}={split}: {source!r} has no such split; available: {names}")


def source_names(spec: str) -> list[str]:
    """Return the sources of a comma list."""
    return [name.strip() for name in spec.split(",") if name.strip()]


@dataclass(frozen=True)
class Sources:
    """A comma list of sources with their split, the largest number of rows (of each and of all), and mixing
    probabilities.

    `flags` are the flags that these values came from, for error messages.
    """

    spec: str
    split: str
    max_samples: int | None = None
    probs: Sequence[float] | None = None
    flags: SourceFlags = DATASET

    @property
    def names(self) -> list[str]:
        """Return the name of each source; rules have checked that there is one, and that the probabilities fit."""
        names = source_names(self.spec)
        assert names and (self.probs is None or len(self.probs) == len(names)), (self.flags.dataset, self.spec)
        return names


def limit_rows(rows: Iterator[Row | RowError], max_samples: int | None) -> Iterator[Row | RowError]:
    """Yield the rows up to the first `max_samples` well-formed ones. Malformed rows are yielded too,
    but not counted."""
    left = max_samples
    for row in rows:
        yield row
        if isinstance(row, Row) and left is not None:
            left -= 1
            if left == 0:
                return
