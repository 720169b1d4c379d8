"""A mistake in the configuration: which flag, what is wrong, how to mend it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Problem:
    """One mistake. `key` is the flag (or the word of the command line), `fix` says what to write instead."""

    key: str
    what: str
    fix: str

    def __str__(self) -> str:
        return f"  {self.key}: {self.what}\n      fix: {self.fix}"


def report(problems: Sequence[Problem]) -> str:
    """All problems as one text for the console."""
    count = "1 problem" if len(problems) == 1 else f"{len(problems)} problems"
    return "\n".join([f"{count} in the configuration:", *map(str, problems)])


def distinct(problems: Iterable[Problem]) -> list[Problem]:
    """Without repetitions, in order of first appearance."""
    return list(dict.fromkeys(problems))
