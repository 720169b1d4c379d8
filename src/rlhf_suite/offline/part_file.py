"""An output file that grows in order and can be continued after a kill at any instant.

Rows are appended to `<output>.part`, as JSON lines. After each group of rows the file is synced, and then the progress
file (in the run folder, replaced as a whole) says how many bytes of it count. A continued run cuts off what is behind
them. At the end the part becomes the output: it is renamed, or converted to parquet.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

from rlhf_suite.disk import file_aside, put, write_json, writing
from rlhf_suite.errors import UserError

PARQUET_ROWS = 8192  # of a row group


@dataclass
class Progress:
    """How far an output is."""

    next_row: int  # of the input: those before it are done
    bytes: int = 0  # of the part file that count
    totals: dict[str, float] = field(default_factory=dict)  # sums over what is written
    done: bool = False  # the output is in its place


class PartFile:
    """The output `path`, of which the file `record` knows how far it is. `resume`: go on where that says."""

    def __init__(self, path: Path, record: Path, first_row: int, resume: bool) -> None:
        self.path, self.part, self.record = path, path.with_name(f"{path.name}.part"), record
        # what becomes the output by a rename: the part itself, or what it is converted to
        self.ready = self.part if path.suffix != ".parquet" else path.with_name(f"{path.name}.part.parquet")
        if resume and record.exists():
            self.progress = self._read()
        else:
            self.progress = self._fresh(first_row)
        if not self.progress.done and not self.part.exists() and not self.ready.exists():
            if not path.exists():
                raise UserError(f"{record} says that rows are in {self.part}, which is gone: start in another folder")
            self._save(done=True)  # killed between the two last steps of `finish`
        if not self.progress.done and self.part.exists():
            self.file = self.part.open("r+b")
            self.file.truncate(self.progress.bytes)
            self.file.seek(self.progress.bytes)

    def _read(self) -> Progress:
        """Return how far the output is. Raises UserError where that or the output is damaged."""
        again = f"Restore it, or delete {self.record} and {self.part} to start again"
        try:
            progress = Progress(**json.loads(self.record.read_text()))
            is_right = progress.next_row >= 0 and progress.bytes >= 0 and isinstance(progress.totals, dict)
        except (ValueError, TypeError):
            is_right = False
        if not is_right:
            raise UserError(f"{self.record} is damaged, so it is not known how far the output is. {again}")
        size = self.part.stat().st_size if self.part.exists() else progress.bytes
        if size < progress.bytes and not progress.done:
            raise UserError(f"{self.part} has {size} bytes of the {progress.bytes} that were written. {again}")
        return progress

    def _fresh(self, first_row: int) -> Progress:
        """Make an empty part, then the record of it: whenever there is a record, there has been a part."""
        for path in (self.path, self.part, self.ready):
            if path.exists() and (path == self.path or path.stat().st_size):
                raise UserError(
                    f"{path} is there already: continue the run that writes it with ckpt.load_enable=true, remove it, "
                    "or choose another output"
                )
        with writing(self.part):
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self.part.touch()
        self.progress = Progress(first_row)
        self._save()
        return self.progress

    def append(self, rows: Sequence[Mapping[str, Any]], next_row: int, sums: Mapping[str, float]) -> None:
        """Write rows, which cover the input up to `next_row`; `sums` are added to the totals."""
        lines = b"".join(encoded(row) for row in rows)
        with writing(self.part):
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
        """Put the output in its place; beside it where something else has appeared there meanwhile."""
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


def encoded(row: Mapping[str, Any]) -> bytes:
    """A row as a line of JSON. A value that JSON does not know becomes its text, half a surrogate pair a ?."""
    return json.dumps(row, ensure_ascii=False, default=str).encode(errors="replace") + b"\n"


def to_parquet(source: Path, target: Path) -> None:
    """JSON lines as parquet, a part at a time. A column is of the one type that all its values fit in."""
    import pyarrow as pa
    from pyarrow.parquet import ParquetWriter

    try:
        schemas = [pa.Table.from_pylist(rows).schema for rows in tables(source)]
        schema = pa.unify_schemas(schemas, promote_options="permissive")
        with ParquetWriter(target, schema) as writer:
            for rows in tables(source):
                writer.write_table(pa.Table.from_pylist(rows, schema=schema))
    except pa.ArrowException as error:
        fix = "the rows are in that file; choose a .jsonl output for such columns"
        raise UserError(f"{source} cannot become parquet, whose columns have one type each: {error}; {fix}") from None


def tables(source: Path) -> Iterator[list[dict[str, Any]]]:
    """The lines of a file, some thousand at a time."""
    with source.open(encoding="utf-8") as file:
        while lines := list(islice(file, PARQUET_ROWS)):
            yield [json.loads(line) for line in lines]
