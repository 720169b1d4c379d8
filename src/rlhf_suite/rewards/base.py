"""What goes into a reward and what comes out: a score or a reason why there is none, never a silent zero."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal


@dataclass(frozen=True)
class RewardRow:
    """One response to be scored."""

    query: str  # prompt and response with special tokens, as the model saw and wrote them
    prompt: str
    response: str
    label: str
    datasource: str
    columns: dict[str, Any] = field(default_factory=dict)  # data.reward_columns of its row


def columns_of(rows: Sequence[RewardRow]) -> dict[str, list[Any]]:
    """The further columns of rows by name, one value for each row."""
    return {name: [row.columns[name] for row in rows] for name in rows[0].columns} if rows else {}


@dataclass(frozen=True)
class Scored:
    """A scored response: `reward` is learned from, `score` (0 to 1) is evaluated, `extra` is logged."""

    reward: float
    score: float
    extra: dict[str, float] = field(default_factory=dict)
    retries: int = 0  # tries before this one


@dataclass(frozen=True)
class RewardFailure:
    """A response that could not be scored, and why."""

    reason: str
    kind: Literal["error", "timeout"]
    retries: int = 0


class LabelError(ValueError):
    """A label that a rule cannot work with: a wrong label is not a wrong response."""


Outcome = Scored | RewardFailure
Scorer = Callable[[list[RewardRow]], list[Outcome]]
