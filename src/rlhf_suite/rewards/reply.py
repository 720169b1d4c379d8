"""Parsing of what a reward function or server answers for a batch: one outcome per row, every mistake reported."""

from __future__ import annotations

import math
from numbers import Real
from typing import Any

from rlhf_suite.foreign_text import printable
from rlhf_suite.rewards.base import Choice, Outcome, PartsError, RewardFailure

MAX_NAMES, MAX_NAME = 256, 100  # of parts and extra_logs: each becomes a metric and a column of the rollouts
SHOWN = 200  # characters of an answer in a message


class ResultError(ValueError):
    """The answer is not what it should be."""


def outcomes(result: Any, count: int, who: str = "reward_func", choice: Choice | None = None) -> list[Outcome]:
    """Return one outcome per row of what `who` returned for `count` rows: {"rewards", "scores"?, "extra_logs"?,
    "errors"?} or the rewards alone. Rewards may be named parts, of which `choice` makes one number: {"rewards": {name:
    [...]}}, or a dict of numbers for each row."""
    try:
        given = result if isinstance(result, dict) else {"rewards": result}
        if "rewards" not in given:
            keys = printable(", ".join(map(show_value, [*given][:MAX_NAMES])), SHOWN)
            raise ResultError(f"{who} returned a dict without 'rewards'; its keys are [{keys}]")
        rewards = reward_column(who, given["rewards"], count)
        scores = None if given.get("scores") is None else column(who, "scores", given["scores"], count)
        extra = name_columns(who, "extra_logs", given.get("extra_logs") or {}, count)
        errors = [None] * count if given.get("errors") is None else column(who, "errors", given["errors"], count)
    except ResultError as error:
        return [RewardFailure(str(error), "error")] * count
    return [
        row_outcome(who, rewards[i], [] if scores is None else [scores[i]], row_of(extra, i), choice or Choice())
        if errors[i] is None
        else RewardFailure(f"{who}: {reason_of(errors[i])}", "error")
        for i in range(count)
    ]


def reward_column(who: str, rewards: Any, count: int) -> list[Any]:
    """Return the reward of each row: a number, or a dict of its parts."""
    if not isinstance(rewards, dict):
        return column(who, "rewards", rewards, count)
    if not rewards:
        raise ResultError(f"{who} returned rewards without a part")
    columns = name_columns(who, "rewards", rewards, count)
    return [row_of(columns, i) for i in range(count)]


def name_columns(who: str, kind: str, named: Any, count: int) -> dict[str, list[Any]]:
    """Return columns by name. A single number under a name stands for every row."""
    if not isinstance(named, dict):
        raise ResultError(f"{who} returned {kind} as {type(named).__name__}; expected names with lists of numbers")
    check_names(who, kind, named)
    columns = {}
    for name, values in named.items():
        plain = values.tolist() if hasattr(values, "tolist") else values
        columns[name] = [plain] * count if isinstance(plain, Real) else column(who, f"{kind}[{name!r}]", plain, count)
    return columns


def check_names(who: str, kind: str, named: dict[Any, Any]) -> None:
    """Raise ResultError if a name cannot be that of a metric, or there are too many."""
    if len(named) > MAX_NAMES:
        raise ResultError(f"{who} returned {len(named)} names in {kind}; {MAX_NAMES} are allowed")
    for name in named:
        if not isinstance(name, str) or not 0 < len(name) <= MAX_NAME or not name.isprintable():
            expected = f"a name of 1 to {MAX_NAME} visible characters, since it becomes the name of a metric"
            raise ResultError(f"{who} returned {kind}[{show_value(name)}]; expected {expected}")


def row_of(columns: dict[str, list[Any]], row: int) -> dict[str, Any]:
    return {name: values[row] for name, values in columns.items()}


def column(who: str, name: str, values: Any, count: int) -> list[Any]:
    """Return the values as a list with one entry per row."""
    if hasattr(values, "tolist"):
        values = values.tolist()
    if not isinstance(values, list | tuple):
        raise ResultError(f"{who} returned {name} as {type(values).__name__}; expected a list of {count} numbers")
    if len(values) != count:
        raise ResultError(f"{who} returned {len(values)} {name} for {count} responses")
    return list(values)


def row_outcome(who: str, reward: Any, score: list[Any], extra: dict[str, Any], choice: Choice) -> Outcome:
    """Return the outcome of a row. `score` is empty if the source gives no scores."""
    try:
        logged = numbers("extra_logs", extra)
        if isinstance(reward, dict):
            check_names(who, "rewards", reward)
            reward = numbers("rewards", reward)
            if not reward:
                raise ResultError("reward has no named part")
        else:
            reward = number("reward", reward)
        return choice.make_scored(reward, number("score", score[0]) if score else None, logged)
    except (ResultError, PartsError) as error:
        return RewardFailure(str(error), "error")


def numbers(kind: str, named: dict[str, Any]) -> dict[str, float]:
    """Return the numbers of a row by name; those that are None are left out."""
    return {name: number(f"{kind}[{name!r}]", value) for name, value in named.items() if value is not None}


def number(name: str, value: Any) -> float:
    """Return a finite float; numpy scalars and 0-dimensional tensors count as numbers."""
    if not isinstance(value, Real) and hasattr(value, "item"):
        value = value.item()
    if not isinstance(value, Real):
        raise ResultError(f"{name} is {show_value(value)}, not a number")
    try:
        result = float(value)
    except OverflowError:
        raise ResultError(f"{name} is too large for a floating-point number") from None
    if not math.isfinite(result):
        raise ResultError(f"{name} is {result}")
    return result


def reason_of(error: Any) -> str:
    """Return the reason that a server gives for a row without a score."""
    return printable(error) if isinstance(error, str) else f"an error {show_value(error)}"


def show_value(value: Any) -> str:
    """Return a value for a message: a text in quotes, of anything else its type, since it may be nested or endless."""
    if isinstance(value, str):
        return f"'{printable(value, SHOWN)}'"
    return "null" if value is None else f"of type {type(value).__name__}"
