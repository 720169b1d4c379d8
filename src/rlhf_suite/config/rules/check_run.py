"""What is wrong between the flags of a run: flags without effect, and every rule. All problems come at once."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from importlib import import_module
from pkgutil import iter_modules

from rlhf_suite.config import rules
from rlhf_suite.config.check.formatting import spell
from rlhf_suite.config.check.problems import RULES, Problem
from rlhf_suite.config.declarations.flags import all_values
from rlhf_suite.config.declarations.runs import Run, flags_of
from rlhf_suite.config.declarations.task_groups import LOOPS
from rlhf_suite.config.plan.loop_stages import stage_problems
from rlhf_suite.config.rules.clients import is_of_the_loop

for module in iter_modules(rules.__path__):
    import_module(f"{rules.__name__}.{module.name}")


def check(run: Run, given: Collection[str]) -> list[Problem]:
    """Return every problem of a run whose single values are fine. `given`: the keys set on the command line."""
    problems = [*find_unused(run, given)]
    for rule, tasks in RULES.items():
        if not tasks or run.task in tasks:
            problems += rule(run)
    if run.task in LOOPS:
        reported = {problem.key for problem in problems}
        of_stages = stage_problems(run, lambda stage: check(stage, ()), set(all_values(run)))
        problems += [problem for problem in of_stages if problem.key not in reported]
    return [problem.of_kind("rule") for problem in problems]


OFF = (None, False, -1)


def find_unused(run: Run, given: Collection[str]) -> Iterator[Problem]:
    """Yield the given flags that this run would not read. One that is set to null, false, 0 or -1 is off by itself."""
    if "own_code" in given:
        yield Problem("own_code", "is written by the run itself", "remove it")
    values = all_values(run)
    unread = sorted(key for key in given if is_of_the_loop(run.task, key))
    for key in unread:
        problem = f"task={run.task} does not read it: its clients score and evaluate by themselves"
        yield Problem(key, problem, "remove it")
    for key, info in flags_of(run.task).items():
        is_set = key in given and key not in unread and values.get(key) not in OFF
        if info.meta.strict:
            is_set = values[key] != info.default
        for condition in info.meta.when if is_set else ():
            if not condition.holds(values):
                why = f": {info.meta.strict}" if info.meta.strict else ""
                problem = f"has no effect with {condition.flag}={spell(values[condition.flag])}{why}"
                off = f"write {key}={spell(info.default)}, or" if info.meta.strict else "remove it, or add"
                yield Problem(key, problem, f"{off} {condition.fix}")
