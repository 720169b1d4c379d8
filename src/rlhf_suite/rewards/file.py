"""Rewards from a user's .py file.

    def reward_func(queries, prompts, labels):                       # lists of str, one entry per response
        return {"rewards": [...], "scores": [...], "extra_logs": {"name": [...]}}   # or the rewards alone

`rewards` may have named parts, {"answer": [...], "format": [...]}, from which reward.reward_key and reward.combine
choose; each is logged. The function is called with whole batches and may be `async def`: all calls run on one event
loop, so that clients and semaphores may be kept between them. It may return lists, tuples,
arrays or tensors. `scores` (0 to 1, for evaluation) default to the rewards. `extra_logs`, any of its names, or an entry
of it (None) may be absent. Each response is scored by itself: when a batch fails, its rows are tried again one at a
time.

With `data.reward_columns=[a,b]` it must have an argument `columns` too, and gets {"a": [...], "b": [...]} as that: what
the row of each response has in these columns. A function that has the argument always gets it.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from rlhf_suite.python_source import import_file
from rlhf_suite.rewards.base import Choice, Outcome, Sample, ScoringFunction, columns_of
from rlhf_suite.rewards.openrlhf_names import offer_openrlhf
from rlhf_suite.rewards.reply import outcomes

RewardFunc = Callable[..., Any]


def make_scorer(path: str, choice: Choice | None = None) -> ScoringFunction:
    """Return the `reward_func` of the file at `path` as a function of samples. The file may import its neighbours."""
    offer_openrlhf()
    reward_func: RewardFunc | None = getattr(import_file(Path(path).resolve()), "reward_func", None)
    if reward_func is None:
        raise AttributeError("the file defines no reward_func(queries, prompts, labels)")

    takes_columns, loop = accepts_columns(reward_func), asyncio.Runner()

    def score(rows: list[Sample]) -> list[Outcome]:
        columns = columns_of(rows)
        if columns and not takes_columns:
            raise TypeError("data.reward_columns is set, but reward_func has no argument named columns")
        further = {"columns": columns} if takes_columns else {}
        queries, prompts, labels = ([getattr(row, name) for row in rows] for name in ("query", "prompt", "label"))
        result = reward_func(queries, prompts, labels, **further)
        if inspect.isawaitable(result):
            result = loop.run(wait_for(result))
        return outcomes(result, len(rows), choice=choice)

    return score


def accepts_columns(function: Callable[..., Any]) -> bool:
    """Return whether a function has an argument `columns`, or takes any."""
    known = inspect.signature(function).parameters.values()
    return any(parameter.name == "columns" or parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in known)


async def wait_for(result: Awaitable[Any]) -> Any:
    """Return the result. If it fails, cancel the tasks that it started: they would go on beside the next call."""
    before = asyncio.all_tasks()
    try:
        return await result
    except BaseException:
        started = asyncio.all_tasks() - before
        for task in started:
            task.cancel()
        await asyncio.gather(*started, return_exceptions=True)
        raise
