"""The files of rollouts and evaluations that a page shows samples of.

They are read from their beginning. If there are more samples than a page holds, every file gets a fair share.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from rlhf_suite.foreign_files import DamagedFile, parquet
from rlhf_suite.report.history import History
from rlhf_suite.run_folders.run_folder import RunFolder, list_samples_files

TEXTS = ("prompt", "response", "label", "datasource", "ending")
REQUIRED = ("prompt", "response", "reward")  # of the columns of a file
OF_TURNS = "turns"  # the column with the records of an agent's turns
NUMBERS_OF_TURN, CALLS, TEXTS_OF_CALL = (
    ("end", "sampling_s", "answer_s"),
    "calls",
    ("name", "arguments", "problem", "answer"),
)
TOKENS = ("owner", "weight_version", "mask", "ids")


def is_number(kind: pa.DataType) -> bool:
    return bool(pa.types.is_floating(kind) or pa.types.is_integer(kind))


def is_text(kind: pa.DataType) -> bool:
    return bool(pa.types.is_string(kind) or pa.types.is_large_string(kind))


def is_turns(kind: pa.DataType) -> bool:
    """Return whether a type is that of the records of turns, which `sample_data.turn_of` reads."""
    turn = kind.value_type if pa.types.is_list(kind) else kind
    if not pa.types.is_struct(turn) or any(turn.get_field_index(name) < 0 for name in (*NUMBERS_OF_TURN, CALLS)):
        return False
    calls = turn.field(CALLS).type
    call = calls.value_type if pa.types.is_list(calls) else calls
    if not pa.types.is_struct(call) or any(call.get_field_index(name) < 0 for name in TEXTS_OF_CALL):
        return False
    numbers, texts = (turn.field(name) for name in NUMBERS_OF_TURN), (call.field(name) for name in TEXTS_OF_CALL)
    is_empty = pa.types.is_null
    return all(is_number(one.type) for one in numbers) and all(is_text(one.type) or is_empty(one.type) for one in texts)


# The columns of a file that a page shows: names, whether a type is right, and what they hold.
COLUMNS: tuple[tuple[tuple[str, ...], Callable[[pa.DataType], bool], str], ...] = (
    ((*TEXTS, "reward_query"), is_text, "texts"),
    (("reward",), is_number, "numbers"),
    (TOKENS, lambda kind: pa.types.is_list(kind) and is_number(kind.value_type), "lists of numbers"),
    ((OF_TURNS,), is_turns, "records of turns"),
)


@dataclass(frozen=True)
class SampleFile:
    """A file of rollouts or evaluations, and how many of its first samples are shown."""

    kind: str
    step: int
    path: Path
    rows: int
    shown: int


@dataclass
class Known:
    """What was read of a file: when it was changed last, its number of rows, the reward of every sample [rows], and its
    first samples."""

    changed: tuple[int, int]
    rows: int
    rewards: NDArray[Any]
    table: pa.Table | None = None


class Reader:
    """Reads files of samples and metrics, each once: a page that is made again reads those files of samples alone that
    are new or were replaced, and those rows of metrics that are new."""

    def __init__(self) -> None:
        self._known: dict[Path, Known] = {}
        self._histories: dict[Path, History] = {}

    def history(self, path: Path) -> History:
        """Return the metrics in a file as they are now. Raises DamagedFile."""
        history = self._histories.setdefault(path, History(path))
        history.read()
        return history

    def look(self, path: Path) -> Known:
        """Return what is known of a file, which is read if it has changed.

        Raises:
            DamagedFile: it lacks a column that all have, or has one of another type.
        """
        stat = path.stat()
        changed, known = (stat.st_mtime_ns, stat.st_ino), self._known.get(path)
        if known is None or known.changed != changed:
            with parquet(path) as file:
                rows = int(file.metadata.num_rows)
                if rows:
                    check_columns(file.schema_arrow, path)
                values = file.read(columns=["reward"])["reward"].to_numpy() if rows else np.zeros(0)
            known = self._known[path] = Known(changed, rows, values.astype(np.float64))
        return known

    def rewards(self, path: Path) -> NDArray[Any]:
        """Return the reward of every sample, [rows]."""
        return self.look(path).rewards

    def read(self, path: Path, count: int) -> pa.Table:
        """Return the first `count` samples."""
        known = self.look(path)
        if known.table is None or len(known.table) < count:
            with parquet(path) as file:
                known.table = pa.Table.from_batches([next(file.iter_batches(max(1, count)))])
                check_tokens(known.table, path)
        return known.table.slice(0, count)


def check_columns(schema: pa.Schema, path: Path) -> None:
    """Raise DamagedFile if a file of samples lacks a column that all have, or has one of another type."""
    for names, is_kind, kind in COLUMNS:
        for name in names:
            place = schema.get_field_index(name)
            if place < 0 and name in REQUIRED:
                raise DamagedFile(f"{path} is damaged: it has no column {name}")
            if place >= 0 and not is_kind(schema.field(place).type):
                raise DamagedFile(f"{path} is damaged: its column {name} does not hold {kind}")


def check_tokens(table: pa.Table, path: Path) -> None:
    """Raise DamagedFile if a file has tokens, and not of each sample the same number in all columns of TOKENS."""
    present = [name for name in TOKENS if name in table.column_names]
    if not present:
        return
    if missing := [name for name in TOKENS if name not in present]:
        raise DamagedFile(f"{path} is damaged: it has a column {present[0]}, and no column {missing[0]}")
    lengths = table["owner"].combine_chunks().value_lengths()
    for name in TOKENS:
        if not is_per_token(table[name].combine_chunks(), lengths):
            raise DamagedFile(f"{path} is damaged: its column {name} does not have one number for each token")
    if len(table) and (pc.min(lengths).as_py() or 0) < 1:
        raise DamagedFile(f"{path} is damaged: it has a sample without tokens")


def is_per_token(column: pa.ListArray, lengths: pa.Array) -> bool:
    """Return whether a column of lists has a number for each token of samples with these lengths, [samples]."""
    return (
        is_number(column.type.value_type) and lengths.equals(column.value_lengths()) and not column.flatten().null_count
    )


def sample_files(folder: RunFolder, samples: int, reader: Reader) -> list[SampleFile]:
    """Return the files of a run that have samples, by their steps, each with its fair share of `samples`."""
    columns = [
        (step, kind, path, reader.look(path).rows)
        for kind, place in (("rollout", folder.rollouts), ("evaluation", folder.evaluations))
        for step, path in list_samples_files(place).items()
    ]
    columns = sorted(column for column in columns if column[-1])
    shown = shares([rows for *_, rows in columns], samples)
    return [
        SampleFile(kind, step, path, rows, share)
        for (step, kind, path, rows), share in zip(columns, shown, strict=True)
    ]


def shares(wanted: Sequence[int], limit: int) -> list[int]:
    """Divide `limit` among those who want some: all get the same, but nobody more than was wanted."""
    result = [0] * len(wanted)
    for done, place in enumerate(sorted(range(len(wanted)), key=lambda place: wanted[place])):
        result[place] = min(wanted[place], limit // (len(wanted) - done))
        limit -= result[place]
    return result
