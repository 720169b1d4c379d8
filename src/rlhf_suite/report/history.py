"""The metrics of a run, read from its metrics.jsonl in parts: what was read is kept, and reading goes on after it.

A point takes 16 bytes, so a page that is watched holds a run of many steps in little memory.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, overload

from rlhf_suite.foreign_files import Position, ReplacedFile, has_type
from rlhf_suite.tracking.metrics import read_numbered_rows

Points = Sequence[tuple[int, float]]


class Curve(Sequence[tuple[int, float]]):
    """The points (step, value) of a metric, one for each step, in their order."""

    def __init__(self) -> None:
        self._steps, self._values = array("q"), array("d")

    def __len__(self) -> int:
        return len(self._steps)

    @overload
    def __getitem__(self, place: int) -> tuple[int, float]: ...
    @overload
    def __getitem__(self, place: slice) -> list[tuple[int, float]]: ...
    def __getitem__(self, place: int | slice) -> tuple[int, float] | list[tuple[int, float]]:
        if isinstance(place, slice):
            return [*zip(self._steps[place], self._values[place], strict=True)]
        return self._steps[place], self._values[place]

    def __iter__(self) -> Iterator[tuple[int, float]]:
        return zip(self._steps, self._values, strict=True)

    def put(self, step: int, value: float, *, is_part: bool) -> None:
        """Set the value of a step, or add to it a value that `is_part` of it."""
        at = len(self) if not len(self) or step > self._steps[-1] else bisect_left(self._steps, step)
        if at < len(self) and self._steps[at] == step:
            self._values[at] = value + (self._values[at] if is_part else 0.0)
        else:
            self._steps.insert(at, step)
            self._values.insert(at, value)

    def cut(self, step: int) -> None:
        """Drop the points from a step on."""
        at = bisect_left(self._steps, step)
        del self._steps[at:], self._values[at:]


class Repetitions:
    """Notices where a run has gone back to an earlier step: a row has a metric of a step's training again. A step may
    have several rows: its training, its evaluation, the proof of its weights."""

    def __init__(self) -> None:
        self._names: dict[frozenset[str], frozenset[str]] = {}  # each set once, because most rows have the same
        self._seen: dict[int, list[frozenset[str]]] = {}

    def is_again(self, row: Mapping[str, Any]) -> bool:
        """Return whether the step of a row, and with it all later ones before this row, was run again."""
        step, trained = row["step"], frozenset(name for name in row if name.startswith("train/"))
        names = self._names.setdefault(trained, trained)
        again = any(not names.isdisjoint(earlier) for earlier in self._seen.get(step, ()))
        if again:
            self._seen = {earlier: sets for earlier, sets in self._seen.items() if earlier < step}
        if names:
            self._seen.setdefault(step, []).append(names)
        return again


class History:
    """Every metric of a metrics.jsonl without nulls, and when its rows were written; of steps that were run again only
    the last. The rows of a step have parts of its seconds, which are added up; of other metrics the last value counts.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._forget()

    def _forget(self) -> None:
        self._position, self._repetitions = Position(), Repetitions()
        self._curves: dict[str, Curve] = {}
        self._times: list[tuple[int, float]] = []

    def read(self) -> None:
        """Read what the file has more than when it was read last; all of it if it is another file.

        Raises:
            DamagedFile: the file cannot be read.
        """
        try:
            self._go_on()
        except ReplacedFile:
            self._forget()
            self._go_on()

    def _go_on(self) -> None:
        for _, row in read_numbered_rows(self._path, self._position):
            if row is not None:
                self._add(row)

    def _add(self, row: Mapping[str, Any]) -> None:
        step = row["step"]
        if self._repetitions.is_again(row):
            self._times = [(earlier, time) for earlier, time in self._times if earlier < step]
            for curve in self._curves.values():
                curve.cut(step)
        if has_type(row.get("time"), float):
            self._times.append((step, row["time"]))
        for name, value in row.items():
            if "/" in name and has_type(value, float):
                self._curves.setdefault(name, Curve()).put(step, value, is_part=name.startswith("timing/"))

    @property
    def curves(self) -> dict[str, Points]:
        """Return the metrics that have points."""
        return {name: curve for name, curve in self._curves.items() if len(curve)}

    @property
    def times(self) -> Points:
        """Return the step of each row and when it was written, in their order in the file."""
        return self._times
