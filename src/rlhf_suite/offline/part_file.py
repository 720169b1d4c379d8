"""An output file that grows in order and can be continued after a kill at any instant.

Rows are appended to `<output>.part` as JSON lines. After each group of rows this file is synced to disk. Then the
progress file in the run folder, which is replaced as a whole, records how many of its bytes are valid. A continued run
truncates the part file to this length. At the end the part file is renamed to the output, or converted to parquet.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

from rlhf_suite.disk import file_aside, name_disk_errors, put, write_json
from rlhf_suite.errors import UserError
from rlhf_suite.foreign_files import DamagedFile, read_table

PARQUET_ROWS = 8192  # in a row group


@dataclass
class Progress:
    """How much of an output is written."""

    next_row: int  # of the input; all rows before it are done
    bytes: int = 0  # valid length of the part file
    totals: dict[str, float] = field(default_factory=dict)  # sums over the rows written so far
    done: bool = False  # whether the output is in its place


FIELDS = {"next_row": int, "bytes": int, "totals": dict[str, float], "done": bool}  # of the record


class PartFile:
    """The output `path`, whose progress is in the file `record`. With `resume`, writing continues from there."""

    def __init__(self, path: Path, record: Path, first_row: int, resume: bool) -> None:
        self.path, self.part, self.record = path, path.with_name(f"{path.name}.part"), record
        # The file that is renamed to the output: the part file itself, or the parquet file made from it.
        self.ready = self.part if path.suffix != ".parquet" else path.with_name(f"{path.name}.part.parquet")
        if resume and record.exists():
            self.progress = self._read()
        else:
            self.progress = self._fresh(first_row)
        if not self.progress.done and not self.part.exists() and not self.ready.exists():
            if not path.exists():
                raise UserError(f"{record} says that rows are in {self.part}, which is missing: use a new folder")
            self._save(done=True)  # the run was killed between the last two steps of `finish`
        if not self.progress.done and self.part.exists():
            self.file = self.part.open("r+b")
            self.file.truncate(self.progress.bytes)
            self.file.seek(self.progress.bytes)

    def _read(self) -> Progress:
        """Return the recorded progress; raise UserError if the record or the part file is damaged."""
        again = f"Restore it, or delete {self.record} and {self.part} to start again"
        try:
            progress = Progress(**read_table(self.record, FIELDS))
            is_right = progress.next_row >= 0 and progress.bytes >= 0
        except (DamagedFile, TypeError):
            is_right = False
        if not is_right:
            raise UserError(f"{self.record} is damaged, so it is not known how many rows are written. {again}")
        size = self.part.stat().st_size if self.part.exists() else progress.bytes
        if size < progress.bytes and not progress.done:
            raise UserError(f"{self.part} has {size} bytes of the {progress.bytes} that were written. {again}")
        return progress

    def _fresh(self, first_row: int) -> Progress:
        """Create an empty part file and then its record, so that a record never exists without a part file.

        Raises:
            UserError: the output or the part file exists already.
        """
        for path in (self.path, self.part, self.ready):
            if path.exists() and (path == self.path or path.stat().st_size):
                raise UserError(
                    f"{path} exists already: continue the run that writes it with ckpt.load_enable=true, remove it, "
                    "or choose another output"
                )
        with name_disk_errors(self.part):
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self.part.touch()
        self.progress = Progress(first_row)
        self._save()
        return self.progress

    def append(self, rows: Sequence[Mapping[str, Any]], next_row: int, sums: Mapping[str, float]) -> None:
        """Append the output rows of the input rows before `next_row`, and add `sums` to the totals."""
        lines = b"".join(encode_row(row) for row in rows)
        with name_disk_errors(self.part):
            self.file.write(lines)
            self.file.flush()
            os.fsync(self.file.fileno())
        totals = self.progress.totals
        self._save(
            next_row=next_row,
            bytes=self.progress.bytes + len(lines),
            totals=totals | {name: totals.get(name, 0.0) + value for name, value in sums.items()},
        )

    def finish(self) -> None:
        """Move the output to its place, or beside it if another file has appeared there in the meantime."""
        if self.progress.done:
            return
        if self.part.exists():
            self.file.close()
            if self.ready != self.part:
                with file_aside(self.ready) as aside:
                    to_parquet(self.part, aside)
                self.part.unlink()
        self.path = put(self.ready, self.path)
        self._save(done=True)

    def _save(self, **values: Any) -> None:
        progress = Progress(**asdict(self.progress) | values)
        write_json(self.record, asdict(progress))
        self.progress = progress


def encode_row(row: Mapping[str, Any]) -> bytes:
    """Return a row as a line of JSON. Values of other types become text; half of a surrogate pair becomes a ?."""
    return json.dumps(row, ensure_ascii=False, default=str).encode(errors="replace") + b"\n"


def to_parquet(source: Path, target: Path) -> None:
    """Convert JSON lines to parquet, some rows at a time. A column has the one type that fits all of its values."""
    import pyarrow as pa
    from pyarrow.parquet import ParquetWriter

    def schema_of(rows: list[dict[str, Any]]) -> pa.Schema:
        names = dict.fromkeys(name for row in rows for name in row)  # `from_pylist` takes the names of the first row
        return pa.Table.from_pydict({name: [row.get(name) for row in rows] for name in names}).schema

    try:
        schemas = [*map(schema_of, tables(source))] or [pa.schema([])]
        schema = pa.unify_schemas(schemas, promote_options="permissive")
        with ParquetWriter(target, schema) as writer:
            for rows in tables(source):
                writer.write_table(pa.Table.from_pylist(rows, schema=schema))
    except (pa.ArrowException, OverflowError) as error:  # the latter where a number has more than 64 bits
        fix = "the rows are in that file; choose a .jsonl output for such columns"
        raise UserError(f"{source} cannot become parquet, whose columns have one type each: {error}; {fix}") from None


def tables(source: Path) -> Iterator[list[dict[str, Any]]]:
    """Yield the rows of a file of JSON lines, some thousand at a time."""
    with source.open(encoding="utf-8") as file:
        while lines := list(islice(file, PARQUET_ROWS)):
            yield [json.loads(line) for line in lines]
