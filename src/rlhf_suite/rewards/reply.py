"""Parsing of what a reward function or server answers for a batch: one outcome per row, every mistake reported."""

from __future__ import annotations

import math
from numbers import Real
from typing import Any

from rlhf_suite.foreign_text import printable
from rlhf_suite.rewards.base import Outcome, RewardFailure, Scored

MAX_NAMES, MAX_NAME = 256, 100  # of extra_logs: each becomes a metric and a column of the rollouts
SHOWN = 200  # characters of an answer in a message


class ResultError(ValueError):
    """The answer is not what it should be."""


def outcomes(result: Any, count: int, who: str = "reward_func") -> list[Outcome]:
    """Return one outcome per row of what `who` returned for `count` rows: {"rewards", "scores"?, "extra_logs"?,
    "errors"?} or the rewards alone."""
    try:
        given = result if isinstance(result, dict) else {"rewards": result}
        if "rewards" not in given:
            keys = printable(", ".join(map(shown, [*given][:MAX_NAMES])), SHOWN)
            raise ResultError(f"{who} returned a dict without 'rewards'; its keys are [{keys}]")
        rewards = column(who, "rewards", given["rewards"], count)
        scores = rewards if given.get("scores") is None else column(who, "scores", given["scores"], count)
        extra = logged_columns(who, given.get("extra_logs"), count)
        errors = [None] * count if given.get("errors") is None else column(who, "errors", given["errors"], count)
    except ResultError as error:
        return [RewardFailure(str(error), "error")] * count
    return [
        row_outcome(rewards[i], scores[i], {name: values[i] for name, values in extra.items()})
        if errors[i] is None
        else RewardFailure(f"{who}: {reason_of(errors[i])}", "error")
        for i in range(count)
    ]


def logged_columns(who: str, logs: Any, count: int) -> dict[str, list[Any]]:
    """Return the columns of extra_logs. A single number under a name stands for every row."""
    if logs is None:
        return {}
    if not isinstance(logs, dict):
        raise ResultError(f"{who} returned extra_logs as {type(logs).__name__}; expected names with lists of numbers")
    if len(logs) > MAX_NAMES:
        raise ResultError(f"{who} returned {len(logs)} names in extra_logs; {MAX_NAMES} are allowed")
    columns = {}
    for name, values in logs.items():
        if not isinstance(name, str) or not 0 < len(name) <= MAX_NAME or not name.isprintable():
            what = f"a name of 1 to {MAX_NAME} visible characters, since it becomes the name of a metric"
            raise ResultError(f"{who} returned extra_logs[{shown(name)}]; expected {what}")
        plain = values.tolist() if hasattr(values, "tolist") else values
        columns[name] = (
            [plain] * count if isinstance(plain, Real) else column(who, f"extra_logs[{name!r}]", plain, count)
        )
    return columns


def column(who: str, name: str, values: Any, count: int) -> list[Any]:
    """Return the values as a list with one entry per row."""
    if hasattr(values, "tolist"):
        values = values.tolist()
    if not isinstance(values, list | tuple):
        raise ResultError(f"{who} returned {name} as {type(values).__name__}; expected a list of {count} numbers")
    if len(values) != count:
        raise ResultError(f"{who} returned {len(values)} {name} for {count} responses")
    return list(values)


def row_outcome(reward: Any, score: Any, extra: dict[str, Any]) -> Outcome:
    try:
        logged = {name: number(f"extra_logs[{name!r}]", value) for name, value in extra.items() if value is not None}
        return Scored(number("reward", reward), number("score", score), logged)
    except ResultError as error:
        return RewardFailure(str(error), "error")


def number(name: str, value: Any) -> float:
    """Return a finite float; numpy scalars and 0-dimensional tensors count as numbers."""
    if not isinstance(value, Real) and hasattr(value, "item"):
        value = value.item()
    if not isinstance(value, Real):
        raise ResultError(f"{name} is {shown(value)}, not a number")
    try:
        result = float(value)
    except OverflowError:
        raise ResultError(f"{name} is too large for a floating-point number") from None
    if not math.isfinite(result):
        raise ResultError(f"{name} is {result}")
    return result


def reason_of(error: Any) -> str:
    """Return the reason that a server gives for a row without a score."""
    return printable(error) if isinstance(error, str) else f"an error {shown(error)}"


def shown(value: Any) -> str:
    """Return a value for a message: a text in quotes, of anything else its type, since it may be nested or endless."""
    if isinstance(value, str):
        return f"'{printable(value, SHOWN)}'"
    return "null" if value is None else f"of type {type(value).__name__}"
