"""The one interface of rewards: a source scores a list of samples, and gives each a score or a reason why it has none.

A sample has text, which rules, files, servers and process reward models read, and tokens, which a reward model reads.
The samples of one call need not belong together: they may be a whole rollout, one group, or rows of a file.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, Protocol

from rlhf_suite.foreign_text import printable

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


@dataclass(frozen=True)
class Sample:
    """One response to be scored. A source reads the text or the tokens; what it does not read may be empty."""

    query: str  # prompt and response with special tokens, as the model saw and wrote them
    prompt: str  # what the model was asked
    response: str  # what it answered; of an episode, its last turn
    label: str  # the right answer, or what else data.label_key has
    datasource: str  # which dataset the row is from
    columns: dict[str, Any] = field(default_factory=dict)  # further columns of the row (data.reward_columns)
    # [n] the tokens of prompt and response
    ids: Sequence[int] | NDArray[np.int64] = field(default=(), compare=False, repr=False)
    images: Sequence[bytes] = field(default=(), compare=False, repr=False)  # the files of those in `ids`
    turns: Sequence[str] = ()  # all turns of the model in order, where others wrote between them; else empty
    group: int | None = field(default=None, compare=False)  # samples of one call with one number are of one prompt

    def text(self) -> dict[str, Any]:
        """Return the fields that reward code in another process reads, as JSON values."""
        values = {name: getattr(self, name) for name in ("query", "prompt", "response", "label", "datasource")}
        return values | {"columns": self.columns} | ({"turns": list(self.turns)} if self.turns else {})


def columns_of(rows: Sequence[Sample]) -> dict[str, list[Any]]:
    """Return the further columns of samples by name, one value for each sample."""
    return {name: [row.columns[name] for row in rows] for name in rows[0].columns} if rows else {}


@dataclass(frozen=True)
class Scored:
    """A scored response: `reward` is learned from, `score` (0 to 1) is evaluated, `extra` is logged."""

    reward: float  # the number that the model is trained on, before shaping
    score: float  # how good the response is, 0 to 1; evaluations count it as passed above 0.5
    extra: dict[str, float] = field(default_factory=dict)  # numbers to log, by name
    retries: int = 0  # tries before this one
    steps: list[float] = field(default_factory=list)  # scores of the steps, by a process reward model
    # What judges wrote, by name, for people to read.
    reasons: dict[str, str] = field(default_factory=dict, compare=False)


class PartsError(ValueError):
    """The named parts of a reward do not give one number: none has the name reward.reward_key, or their sum is too
    large."""


@dataclass(frozen=True)
class Choice:
    """How named parts of a reward become the number that is trained on: reward.reward_key and reward.combine."""

    key: str | None = None  # of the part, or of another named number; None: all parts, by `combine`
    combine: str = "sum"  # or max

    def reward(self, given: float | Mapping[str, float], others: Mapping[str, float]) -> float:
        """Return the reward of a response whose source gave a number or named parts, and `others` to be logged.

        Raises:
            PartsError: nothing has the name `key`, or the sum of the parts is not finite.
        """
        parts = given if isinstance(given, Mapping) else {}
        if self.key is not None:
            named = {**others, **parts}
            if self.key not in named:
                known = printable(", ".join(named)) or "none"
                raise PartsError(f"reward.reward_key={self.key}, and the named numbers of this reward are: {known}")
            return named[self.key]
        if not isinstance(given, Mapping):
            return given
        if self.combine == "max":
            return max(given.values(), default=0.0)
        try:
            return math.fsum(given.values())
        except OverflowError:
            raise PartsError("the sum of the parts of this reward is too large for a floating-point number") from None

    def make_scored(
        self, given: float | Mapping[str, float], score: float | None = None, others: Mapping[str, float] | None = None
    ) -> Scored:
        """Return a scored response. Without a `score`, the reward is evaluated too. Every named number is logged."""
        reward = self.reward(given, others or {})
        parts = given if isinstance(given, Mapping) else {}
        return Scored(reward, reward if score is None else score, {**(others or {}), **parts})


class RewardSource(Protocol):
    """Scores samples."""

    def score(self, samples: list[Sample]) -> list[Outcome]:
        """Return one outcome per sample, in their order."""
        ...

    def close(self) -> None:
        """End what the source started."""
        ...


@dataclass(frozen=True)
class RewardFailure:
    """A response that could not be scored, and why."""

    reason: str
    kind: Literal["error", "timeout"]
    retries: int = 0


class LabelError(ValueError):
    """A label that a rule cannot work with: a wrong label is not a wrong response."""


Outcome = Scored | RewardFailure
ScoringFunction = Callable[[list[Sample]], list[Outcome]]
