"""One row of data, where it came from, and what is done when it cannot be used."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, field

from rlhf_suite.errors import UserError


class RowError(UserError):
    """One row cannot be used: where and why. The reason names nothing of the row itself, so equal causes add up."""

    def __init__(self, where: str, reason: str) -> None:
        super().__init__(where, reason)  # both as arguments, so that the error pickles
        self.where, self.reason = where, reason

    def __str__(self) -> str:
        return f"{self.where}: {self.reason}"


class DataError(UserError):
    """A bad row ended the run, as `data.on_bad_row=stop` asks."""


@dataclass(frozen=True)
class Row:
    """Column values of one row. `line` counts from 1: the line of a jsonl or csv file, else the number of the row."""

    values: dict[str, object]
    source: str
    line: int

    @property
    def where(self) -> str:
        """`file:line`, for messages."""
        return f"{self.source}:{self.line}"


def required(row: Row, key: str) -> object:
    """The value of column `key`; RowError if the row has no such column or nothing in it."""
    if key not in row.values:
        raise RowError(row.where, f"no column {key!r}; columns: {', '.join(row.values) or 'none'}")
    value = row.values[key]
    if value is None:
        raise RowError(row.where, f"column {key!r} is null")
    return value


def joined(row: Row, key: str) -> object:
    """The value of column `key`; where `key` is a comma list, the texts of its columns with a blank line between them,
    without those that are blank or null."""
    names = [name.strip() for name in key.split(",")]
    if key in row.values or len(names) == 1:
        return required(row, key)
    texts = [required(row, name) if row.values.get(name, "") is not None else "" for name in names]
    for name, text in zip(names, texts, strict=True):
        if not isinstance(text, str):
            raise RowError(row.where, f"column {name!r} is of type {type(text).__name__}, so it joins no other column")
    return "\n\n".join(str(text) for text in texts if str(text).strip())


def number(row: Row, key: str) -> float:
    """The number in column `key`."""
    value = required(row, key)
    try:
        result = float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        result = math.nan
    if not math.isfinite(result):
        raise RowError(row.where, f"column {key!r} is no number")
    return result


@dataclass
class BadRows:
    """The rows that could not be used (`add`) and the rows that were used with a change (`note`), counted by reason."""

    policy: str  # data.on_bad_row: "skip" or "stop"
    bad: Counter[str] = field(default_factory=Counter)
    noted: Counter[str] = field(default_factory=Counter)
    first: dict[str, str] = field(default_factory=dict)  # reason -> where it was first seen

    @property
    def count(self) -> int:
        """Rows that could not be used."""
        return self.bad.total()

    def add(self, where: str, reason: str) -> None:
        """Count a row that cannot be used; with policy "stop", end the run here."""
        if self.policy == "stop":
            raise DataError(f"{where}: {reason}. Mend the row, or skip such rows with data.on_bad_row=skip")
        self.bad[reason] += 1
        self.first.setdefault(reason, where)

    def note(self, where: str, reason: str) -> None:
        """Count a row that was used, but not as it was written."""
        self.noted[reason] += 1
        self.first.setdefault(reason, where)

    def merge(self, other: BadRows) -> None:
        """Add what was counted elsewhere."""
        self.bad.update(other.bad)
        self.noted.update(other.noted)
        self.first = other.first | self.first

    def summary(self) -> str:
        """For a log: `3 rows skipped: 2 x not JSON (first a.jsonl:7), 1 x ...`; empty when there is nothing to say."""
        parts = [self._describe("skipped", self.bad), self._describe("changed", self.noted)]
        return "; ".join(part for part in parts if part)

    def _describe(self, verb: str, reasons: Counter[str]) -> str:
        if not reasons:
            return ""
        listed = [f"{count} x {reason} (first {self.first[reason]})" for reason, count in reasons.most_common(5)]
        more = [f"{len(reasons) - 5} more reasons"] if len(reasons) > 5 else []
        return f"{reasons.total()} row{'s' * (reasons.total() > 1)} {verb}: {', '.join(listed + more)}"
