"""One row of data, where it came from, and what happens when it cannot be used."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, field

from rlhf_suite.errors import UserError

HALF = "a text has half of a surrogate pair (such as \\ud800), which is not a character"


class RowError(UserError):
    """An error in one row: where and why. The reason contains no value of the row, so equal reasons can be counted."""

    def __init__(self, where: str, reason: str) -> None:
        super().__init__(where, reason)  # both as arguments, so that the error pickles
        self.where, self.reason = where, reason

    def __str__(self) -> str:
        return f"{self.where}: {self.reason}"


class LeftOut(RowError):
    """A well-formed row that this run does not use: it is too long, or its two responses are the same."""


class DataError(UserError):
    """Too many bad rows: one with `data.on_bad_row=stop`, or a larger share than `data.max_skipped_share`."""


@dataclass(frozen=True)
class Row:
    """The column values of one row. `line` counts from 1: the line in a jsonl or csv file, or else the number of the
    row."""

    values: dict[str, object]
    source: str
    line: int

    @property
    def where(self) -> str:
        """Return `file:line`, for messages."""
        return f"{self.source}:{self.line}"


def require_value(row: Row, key: str) -> object:
    """Return the value of column `key`.

    Raises:
        RowError: the row has no such column, or the column is null or NaN, which pandas writes for null.
    """
    if key not in row.values:
        raise RowError(row.where, f"no column {key!r}; columns: {', '.join(map(str, row.values)) or 'none'}")
    value = row.values[key]
    if value is None:
        raise RowError(row.where, f"column {key!r} is null")
    if isinstance(value, float) and math.isnan(value):
        raise RowError(row.where, f"column {key!r} is NaN")
    return value


def join_columns(row: Row, key: str) -> object:
    """Return the value of column `key`, or the texts of a comma list of columns, joined by blank lines.

    Columns of a list that are blank or null are skipped.
    """
    names = [name.strip() for name in key.split(",")]
    if key in row.values or len(names) == 1:
        return require_value(row, key)
    texts = [require_value(row, name) if row.values.get(name, "") is not None else "" for name in names]
    for name, text in zip(names, texts, strict=True):
        if not isinstance(text, str):
            raise RowError(
                row.where,
                f"column {name!r} is of type {type(text).__name__}, so it cannot be joined with other columns",
            )
    return "\n\n".join(str(text) for text in texts if str(text).strip())


def number(row: Row, key: str) -> float:
    """Return the number in column `key`.

    Raises:
        RowError: the column has no finite number.
    """
    value = require_value(row, key)
    try:
        result = float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError, OverflowError):
        result = math.nan
    if not math.isfinite(result):
        raise RowError(row.where, f"column {key!r} is not a number")
    return result


BOOLEANS = {"1": True, "1.0": True, "true": True, "yes": True, "0": False, "0.0": False, "false": False, "no": False}


def boolean(row: Row, key: str) -> bool:
    """Return the truth value in column `key`: 1 or 0, true or false, yes or no, as a value or as text."""
    value = str(require_value(row, key)).strip().lower()
    if value not in BOOLEANS:
        raise RowError(row.where, f"column {key!r} is neither 1 (true, yes) nor 0 (false, no)")
    return BOOLEANS[value]


@dataclass
class BadRows:
    """Counts of the rows that were read, and of those that were not used or were changed, by reason.

    `bad` rows cannot be used at all (`add`), `left_out` rows are well-formed but not for this run (`leave_out`), and
    `noted` rows were used with a change (`note`).
    """

    policy: str  # data.on_bad_row: "skip" or "stop"
    bad: Counter[str] = field(default_factory=Counter)
    left_out: Counter[str] = field(default_factory=Counter)
    noted: Counter[str] = field(default_factory=Counter)
    first: dict[str, str] = field(default_factory=dict)  # reason -> the first place where it occurred
    rows: int = 0  # rows that were read; 0 if they were not counted

    @property
    def count(self) -> int:
        """Return the number of rows that were not used."""
        return self.bad.total() + self.left_out.total()

    def add(self, where: str, reason: str) -> None:
        """Count a row that cannot be used; with policy "stop", raise DataError."""
        self._stop(where, reason)
        self.bad[reason] += 1
        self.first.setdefault(reason, where)

    def leave_out(self, where: str, reason: str) -> None:
        """Count a well-formed row that is not used; with policy "stop", raise DataError."""
        self._stop(where, reason)
        self.left_out[reason] += 1
        self.first.setdefault(reason, where)

    def note(self, where: str, reason: str) -> None:
        """Count a row that was used with a change."""
        self.noted[reason] += 1
        self.first.setdefault(reason, where)

    def merge(self, other: BadRows) -> None:
        """Add the counts of `other`."""
        self.bad.update(other.bad)
        self.left_out.update(other.left_out)
        self.noted.update(other.noted)
        self.first = other.first | self.first
        self.rows += other.rows

    def check_share(self, max_share: float, source: str) -> None:
        """Raise DataError if a larger share of the rows of `source` is bad than `max_share`.

        A share above 0 allows at least one bad row, however few rows there are.
        """
        bad = self.bad.total()
        allowed = max(1, math.floor(max_share * self.rows + 1e-9)) if max_share > 0 else 0
        if bad > allowed:
            raise DataError(
                f"{bad} of {self.rows} rows of {source} cannot be used, and data.max_skipped_share={max_share:g} "
                f"allows {allowed}: {self._reasons(self.bad)}. Repair the rows, or allow more: "
                f"data.max_skipped_share={math.ceil(100 * bad / self.rows) / 100:g}"
            )

    def summary(self) -> str:
        """Return a line for the log: `3 of 60 rows skipped: 2 x not JSON (first a.jsonl:7), 1 x ...`, or "" if all rows
        were used."""
        kinds = [("skipped", self.bad), ("left out", self.left_out)]
        parts = [self._describe(verb, reasons) for verb, reasons in kinds if reasons]
        if self.noted:  # one row may have several changes, so the counts have no meaningful sum
            parts.append(f"changed{f' of {self.rows} rows' if self.rows else ''}: {self._reasons(self.noted)}")
        return "; ".join(parts)

    def _stop(self, where: str, reason: str) -> None:
        if self.policy == "stop":
            raise DataError(f"{where}: {reason}. Repair the row, or skip such rows with data.on_bad_row=skip")

    def _describe(self, verb: str, reasons: Counter[str]) -> str:
        """Return `3 of 60 rows <verb>: <reasons>`."""
        total = reasons.total()
        rows = f"{total} of {self.rows} rows" if self.rows else f"{total} row{'s' * (total > 1)}"
        return f"{rows} {verb}: {self._reasons(reasons)}"

    def _reasons(self, reasons: Counter[str]) -> str:
        """Return the most common reasons, each with its count and its first place."""
        listed = [f"{count} x {reason} (first {self.first[reason]})" for reason, count in reasons.most_common(5)]
        more = [f"{len(reasons) - 5} more reasons"] if len(reasons) > 5 else []
        return ", ".join(listed + more)
