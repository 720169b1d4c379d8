"""What a reward function or server answered for a batch, as an outcome per row: checked, never papered over."""

from __future__ import annotations

import math
from numbers import Real
from typing import Any

from rlhf_suite.rewards.base import Outcome, RewardFailure, Scored


class ResultError(ValueError):
    """The answer is not what it should be."""


def outcomes(result: Any, count: int, who: str = "reward_func") -> list[Outcome]:
    """What `who` returned for `count` rows: {"rewards", "scores"?, "extra_logs"?, "errors"?} or the rewards alone."""
    try:
        given = result if isinstance(result, dict) else {"rewards": result}
        if "rewards" not in given:
            raise ResultError(f"{who} returned a dict without 'rewards'; its keys are {list(given)}")
        rewards = column(who, "rewards", given["rewards"], count)
        scores = rewards if given.get("scores") is None else column(who, "scores", given["scores"], count)
        logs = given.get("extra_logs") or {}
        if not isinstance(logs, dict):
            raise ResultError(
                f"{who} returned extra_logs as {type(logs).__name__}; expected names with lists of numbers"
            )
        extra = {name: column(who, f"extra_logs[{name!r}]", values, count) for name, values in logs.items()}
        errors = [None] * count if given.get("errors") is None else column(who, "errors", given["errors"], count)
    except ResultError as error:
        return [RewardFailure(str(error), "error")] * count
    return [
        row_outcome(rewards[i], scores[i], {name: values[i] for name, values in extra.items()})
        if errors[i] is None
        else RewardFailure(f"{who}: {errors[i]}", "error")
        for i in range(count)
    ]


def column(who: str, name: str, values: Any, count: int) -> list[Any]:
    """One entry per row."""
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
    """A finite float; numpy scalars and 0-dimensional tensors count as numbers."""
    if not isinstance(value, Real) and hasattr(value, "item"):
        value = value.item()
    if not isinstance(value, Real):
        raise ResultError(f"{name} is {value!r}, not a number")
    if not math.isfinite(value):
        raise ResultError(f"{name} is {value}")
    return float(value)
