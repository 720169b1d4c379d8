"""What is wrong between the flags of a run: flags without effect, and every rule. All problems come at once."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator
from functools import cache
from importlib import import_module
from pathlib import Path
from pkgutil import iter_modules
from typing import Any, get_type_hints

from rlhf_suite.config import rules
from rlhf_suite.config.flags import FIXED, all_values
from rlhf_suite.config.formatting import spelled
from rlhf_suite.config.loop_stages import stage_problems
from rlhf_suite.config.names import flags_of, unknown_flag
from rlhf_suite.config.problems import RULES, Problem, rule
from rlhf_suite.config.record import resume_of
from rlhf_suite.config.runs import LoopRun, ResumableRun, Run

for module in iter_modules(rules.__path__):
    import_module(f"{rules.__name__}.{module.name}")


def check(run: Run, given: Collection[str]) -> list[Problem]:
    """Return every problem of a run whose single values are fine. `given`: the keys set on the command line."""
    problems = [*unused(run, given)]
    for each in RULES:
        if isinstance(run, run_type(each)):
            problems += each(run)
    if isinstance(run, LoopRun):
        reported = {problem.key for problem in problems}
        found = stage_problems(run, lambda stage: check(stage, ()), set(all_values(run)))
        problems += [problem for problem in found if problem.key not in reported]
    return problems


@cache
def run_type(function: Callable[..., Iterable[Problem]]) -> Any:
    """Return the type of the runs that a rule is about, by the annotation of its parameter."""
    return get_type_hints(function)["run"]


OFF = (None, False, -1)


def unused(run: Run, given: Collection[str]) -> Iterator[Problem]:
    """Yield the given flags that this run would not read. One that is set to null, false, 0 or -1 is off by itself."""
    if "own_code" in given:
        yield Problem("own_code", "is written by the run itself", "remove it")
    values = all_values(run)
    for key, info in flags_of(run.task).items():
        is_set = key in given and values.get(key) not in OFF
        if info.meta.strict:
            is_set = values[key] != info.default
        for condition in info.meta.when if is_set else ():
            if not condition.holds(values):
                why = f": {info.meta.strict}" if info.meta.strict else ""
                what = f"has no effect with {condition.flag}={spelled(values[condition.flag])}{why}"
                off = f"write {key}={spelled(info.default)}, or" if info.meta.strict else "remove it, or add"
                yield Problem(key, what, f"{off} {condition.fix}")


@rule
def model_is_named(run: Run) -> Iterator[Problem]:
    if run.MODEL.endswith("model_name_or_path") and all_values(run)[run.MODEL] is None:
        demo = f", or demo={run.task} for a small built-in example" if run.HAS_DEMO else ""
        fix = f"add {run.MODEL}=<HF folder or hub name>{demo}"
        yield Problem(run.MODEL, "no model is named", fix)


@rule
def model_folders_exist(run: Run) -> Iterator[Problem]:
    for key, path in all_values(run).items():
        if not key.endswith("model_name_or_path") or path is None or not path.startswith(("/", "./", "../", "~")):
            continue
        if not Path(path).is_dir():
            yield Problem(key, f"there is no folder {path}", "give a Hugging Face folder, a hub name or builtin:tiny")


@rule
def allowed_changes_are_flags(run: ResumableRun) -> Iterator[Problem]:
    key, values = "ckpt.allow_changes", all_values(run)
    for name in run.ckpt.allow_changes:
        if name not in values and not any(each.startswith(f"{name}.") for each in values):
            unknown = unknown_flag(name, run.task)
            yield Problem(key, f"{name}: {unknown.what}", unknown.fix)
        elif resume_of(name, run.task) == FIXED:
            what = f"{name} can never change: a checkpoint cannot be loaded with another value"
            yield Problem(key, what, f"remove {name} from the list, or start a new run in another folder")
