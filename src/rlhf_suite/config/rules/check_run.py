"""What is wrong between the flags of a run: flags without effect, flags that lack what they need, and every rule. All
problems come at once."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from importlib import import_module
from pkgutil import iter_modules
from typing import Any

from rlhf_suite.config import rules
from rlhf_suite.config.check.problems import RULES, Problem
from rlhf_suite.config.declarations.conditions import OFF, Condition, Need
from rlhf_suite.config.declarations.flag_types import spell
from rlhf_suite.config.declarations.flags import FlagInfo, all_values
from rlhf_suite.config.declarations.launch import OF_RAY
from rlhf_suite.config.declarations.runs import Run, flags_of
from rlhf_suite.config.declarations.task_groups import LOOPS, PLANNED
from rlhf_suite.config.plan.loop_stages import stage_problems
from rlhf_suite.config.plan.run_plan import is_on_ray

for module in iter_modules(rules.__path__):
    import_module(f"{rules.__name__}.{module.name}")


def check(run: Run, given: Collection[str]) -> list[Problem]:
    """Return every problem of a run whose single values are fine. `given`: the keys set on the command line.

    A rule about a flag that lacks what it needs has nothing to add.
    """
    problems = [*find_unused(run, given), *find_unmet(run, given)]
    reported = {problem.key for problem in problems}
    for rule, tasks in RULES.items():
        if not tasks or run.task in tasks:
            problems += [problem for problem in rule(run) if problem.key not in reported]
    if run.task in LOOPS:
        reported = {problem.key for problem in problems}
        of_stages = stage_problems(run, lambda stage: check(stage, ()), set(all_values(run)))
        problems += [problem for problem in of_stages if problem.key not in reported]
    return [problem.of_kind("rule") for problem in problems]


def find_unused(run: Run, given: Collection[str]) -> Iterator[Problem]:
    """Yield the given flags that no run of the task reads with others as they are."""
    if "own_code" in given:
        yield Problem("own_code", "is written by the run itself", "remove it")
    for key in list_flags_without_ray(run):
        if key in given and all_values(run)[key] is not None:
            yield Problem(key, "has no effect: the run is one process, which is not on Ray", "remove it")


def list_flags_without_ray(run: Run) -> tuple[str, ...]:
    """Return the flags that a run does not read because it is one process."""
    return OF_RAY if run.task in PLANNED and not is_on_ray(run) else ()


def find_unmet(run: Run, given: Collection[str]) -> Iterator[Problem]:
    """Yield flags that are not read and those that lack what they need.

    A flag that is not read is a problem where it is given, or where it needs what it is not read without. One that is
    set to null, false, 0 or -1 is off by itself, and what it needs otherwise does not matter.
    """
    values = all_values(run)
    for key, info in flags_of(run.task).items():
        unread, unmet = judge(info, values)
        yield from (unmet_problem(info, need, values) for need in unmet)
        if not unmet and key in given and values.get(key) not in OFF:
            for condition in unread:
                problem = f"has no effect with {condition.flag}={spell(values[condition.flag])}"
                yield Problem(key, problem, f"remove it, or add {condition.fix}")


def judge(info: FlagInfo, values: Mapping[str, Any]) -> tuple[list[Condition], list[Need]]:
    """Return the conditions without which a flag is not read, and what it lacks of its needs. One that is not read
    lacks what it is not read without, at most."""
    unread = [condition for condition in info.meta.when if not condition.holds(values)]
    concerned = [need for need in info.meta.needs if need.concerns(values[info.key], info.default)]
    unmet = [need for need in concerned if not need.condition.holds(values)]
    return unread, [need for need in unmet if need.condition in unread] if unread else unmet


def unmet_problem(info: FlagInfo, need: Need, values: Mapping[str, Any]) -> Problem:
    """Return the problem of a flag that lacks what it needs."""
    key, others = info.key, need.condition.choices
    actual = " and ".join(spell(values[other.flag]) for other in others)
    are = "it is" if len(others) == 1 else "they are"
    problem = f"{spell(values[key])} needs {need.condition.demand}, but {are} {actual}: {need.why}"
    off = f"{key}={need.off or spell(info.default)}"
    return Problem(key, problem, need.fix or f"write {', or '.join(filter(None, (need.condition.fix, off)))}")
