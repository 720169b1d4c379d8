"""Flags that would do nothing: set on the command line, but read only when another flag has a certain value."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import asdict

from rlhf_suite.config.formatting import spelled
from rlhf_suite.config.names import flags_of
from rlhf_suite.config.problems import Problem
from rlhf_suite.config.resolve import flat
from rlhf_suite.config.runs import Run

OFF = (None, False, -1)


# Numbers of an objective: with another value than their default they are never set in vain, wherever they come from.
NEVER_IN_VAIN = ("gamma", "lambd", "label_smoothing")


def unused(run: Run, given: Collection[str]) -> Iterator[Problem]:
    """Yield the given flags that this run would not read. One that is set to null, false, 0 or -1 is off by itself."""
    if "own_code" in given:
        yield Problem("own_code", "is written by the run itself", "remove it")
    values = flat(asdict(run))
    for key, info in flags_of(run.task).items():
        is_set = key in given and values.get(key) not in OFF
        is_vain = key.rpartition(".")[2] in NEVER_IN_VAIN and values[key] != info.default
        if not is_set and not is_vain:
            continue
        for condition in info.meta.when:
            if not condition.holds(values):
                what = f"has no effect with {condition.flag}={spelled(values[condition.flag])}"
                yield Problem(key, what, f"remove it, or add {condition.fix}")
