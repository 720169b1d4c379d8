"""Flags that would do nothing: set on the command line, but read only when another flag has a certain value."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import asdict

from rlhf_suite.config.formatting import spelled
from rlhf_suite.config.names import flags_of
from rlhf_suite.config.problems import Problem
from rlhf_suite.config.resolve import flat
from rlhf_suite.config.runs import Run

OFF = (None, False, -1)


def unused(run: Run, given: Iterable[str]) -> Iterator[Problem]:
    """Yield the given flags that this run would not read. One that is set to null, false, 0 or -1 is off by itself."""
    values, flags = flat(asdict(run)), flags_of(run.task)
    for key in given:
        if key not in flags or values.get(key) in OFF:
            continue
        for condition in flags[key].meta.when:
            if not condition.holds(values):
                what = f"has no effect with {condition.flag}={spelled(values[condition.flag])}"
                yield Problem(key, what, f"remove it, or add {condition.fix}")
