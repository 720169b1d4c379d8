"""What goes into a reward and what comes out: a score or a reason why there is none, never a silent zero."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal


@dataclass(frozen=True)
class RewardRow:
    """One response to be scored."""

    query: str  # prompt and response with special tokens, as the model saw and wrote them
    prompt: str
    response: str
    label: str
    datasource: str


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
