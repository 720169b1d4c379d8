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
        if resume and record.exists():
            self.progress = Progress(**json.loads(record.read_text()))
        else:
            self.progress = self._fresh(first_row)
        if not self.progress.done and not self.part.exists() and path.exists():
            self._save(done=True)  # killed between the two last steps of `finish`
        if not self.progress.done:
            self.file = self.part.open("r+b" if self.part.exists() else "w+b")
            self.file.truncate(self.progress.bytes)
            self.file.seek(self.progress.bytes)

    def _fresh(self, first_row: int) -> Progress:
        for path in (self.path, self.part):
            if path.exists():
                raise UserError(
                    f"{path} is there already: continue the run that writes it with ckpt.load_enable=true, remove it, "
                    "or choose another output"
                )
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.progress = Progress(first_row)
        self._save()
        return self.progress

    def append(self, rows: Sequence[Mapping[str, Any]], next_row: int, sums: Mapping[str, float]) -> None:
        """Write rows, which cover the input up to `next_row`; `sums` are added to the totals."""
        lines = b"".join(encoded(row) for row in rows)
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
        """Put the output in its place."""
        if self.progress.done:
            self.part.unlink(missing_ok=True)
            return
        self.file.close()
        if self.path.suffix == ".parquet":
            aside = self.path.with_name(f"{self.path.name}.tmp")
            to_parquet(self.part, aside)
            move(aside, self.path)
            self._save(done=True)
            self.part.unlink()
        else:
            move(self.part, self.path)
            self._save(done=True)

    def _save(self, **values: Any) -> None:
        progress = Progress(**asdict(self.progress) | values)
        aside = self.record.with_suffix(".tmp")
        with aside.open("w") as file:
            json.dump(asdict(progress), file)
            file.flush()
            os.fsync(file.fileno())
        move(aside, self.record)
        self.progress = progress


def encoded(row: Mapping[str, Any]) -> bytes:
    """A row as a line of JSON. A value that JSON does not know becomes its text, half a surrogate pair a ?."""
    return json.dumps(row, ensure_ascii=False, default=str).encode(errors="replace") + b"\n"


def move(source: Path, target: Path) -> None:
    """Rename, for good: the folder is synced."""
    source.replace(target)
    folder = os.open(target.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


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
