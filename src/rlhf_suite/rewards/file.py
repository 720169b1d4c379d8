"""Rewards from a user's .py file.

    def reward_func(queries, prompts, labels):                       # lists of str, one entry per response
        return {"rewards": [...], "scores": [...], "extra_logs": {"name": [...]}}   # or the rewards alone

It is called with whole batches and may be `async def`. Lists, tuples, arrays and tensors will do. `scores` (0 to 1, for
evaluation) default to the rewards; `extra_logs`, any of its names, or an entry of it (None) may be absent. A response
is to be scored by itself: when a batch fails, its rows are tried again one at a time.
"""

from __future__ import annotations

import asyncio
import importlib.util
import inspect
import math
import sys
from collections.abc import Awaitable, Callable
from numbers import Real
from pathlib import Path
from typing import Any

from rlhf_suite.rewards.base import Outcome, RewardFailure, RewardRow, Scored, Scorer

RewardFunc = Callable[[list[str], list[str], list[str]], Any]


class ResultError(ValueError):
    """What reward_func returned is not what it should return."""


def make_scorer(path: str) -> Scorer:
    """The `reward_func` of the file at `path` over rows. The file may import its neighbours."""
    sys.path.insert(0, str(Path(path).resolve().parent))
    spec = importlib.util.spec_from_file_location("reward_file", path)
    assert spec is not None and spec.loader is not None, path
    module = importlib.util.module_from_spec(spec)
    sys.modules["reward_file"] = module  # dataclasses and pickle look their module up
    spec.loader.exec_module(module)
    reward_func: RewardFunc | None = getattr(module, "reward_func", None)
    if reward_func is None:
        raise AttributeError("the file defines no reward_func(queries, prompts, labels)")

    def score(rows: list[RewardRow]) -> list[Outcome]:
        result = reward_func([row.query for row in rows], [row.prompt for row in rows], [row.label for row in rows])
        if inspect.isawaitable(result):
            result = asyncio.run(wait_for(result))
        return outcomes(result, len(rows))

    return score


async def wait_for(result: Awaitable[Any]) -> Any:
    return await result


def outcomes(result: Any, count: int) -> list[Outcome]:
    """What `reward_func` returned for `count` rows, as an outcome per row; what is wrong becomes their reason."""
    try:
        given = result if isinstance(result, dict) else {"rewards": result}
        if "rewards" not in given:
            raise ResultError(f"reward_func returned a dict without 'rewards'; its keys are {list(given)}")
        rewards = column("rewards", given["rewards"], count)
        scores = rewards if given.get("scores") is None else column("scores", given["scores"], count)
        logs = given.get("extra_logs") or {}
        extra = {name: column(f"extra_logs[{name!r}]", values, count) for name, values in logs.items()}
    except ResultError as error:
        return [RewardFailure(str(error), "error")] * count
    return [
        row_outcome(rewards[i], scores[i], {name: values[i] for name, values in extra.items()}) for i in range(count)
    ]


def column(name: str, values: Any, count: int) -> list[Any]:
    """One entry per row."""
    if hasattr(values, "tolist"):
        values = values.tolist()
    if not isinstance(values, list | tuple):
        raise ResultError(f"reward_func returned {name} as {type(values).__name__}; expected a list of {count} numbers")
    if len(values) != count:
        raise ResultError(f"reward_func returned {len(values)} {name} for {count} responses")
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
