"""Names of flags: those that do not exist, those that are called otherwise here, and the nearest ones."""

from __future__ import annotations

import re
import shlex
from collections.abc import Collection, Mapping
from dataclasses import replace
from functools import cache, reduce
from typing import Any

from rlhf_suite.config.check.formatting import did_you_mean, nearest, quote
from rlhf_suite.config.check.old_names import BECOMES, GONE, HINTS, MOVED, NOTHING, RENAMED, translate_value
from rlhf_suite.config.check.problems import Problem
from rlhf_suite.config.declarations.flag_types import spell
from rlhf_suite.config.declarations.flags import all_values
from rlhf_suite.config.declarations.runs import Run, flags_of, list_tasks_with

SECRETS = ("logger.wandb.key", "use_wandb", "wandb_key")

WORD = re.compile(r"[\w.]+\w")  # finds the flags that a sentence of `old_names` speaks of
PLAIN = re.compile(r"[\w./:+-]+")  # texts that Hydra's grammar reads as they are


def unread(task: str, values: Mapping[str, Any]) -> set[str]:
    """Return the flags that a run of a task with these values does not read, such as those of models that it lacks.

    A flag without a value has its default. The values may be those of a damaged file: a condition that cannot be judged
    is met.
    """
    known = all_values(Run.of(task)) | {**values}
    return {
        key
        for key, info in flags_of(task).items()
        if not all(condition.may_hold(known) for condition in info.meta.when)
    }


def rename(key: str, known: Collection[str]) -> str | None:
    """Return the present name of the flag that OpenRLHF calls `key`, if `known` has it."""
    key = key.replace("-", "_")
    given = RENAMED.get(key, ())
    candidates = [given] if isinstance(given, str) else [*given]
    if key.startswith(MOVED):
        candidates += [f"actor.{key.removeprefix('model.')}", f"algo.{key.removeprefix('model.')}"]
    if "." not in key:
        candidates.append(f"data.{key}")
        candidates += [name for name in known if name.replace(".", "_") == key]
        same_word = [name for name in known if name.rpartition(".")[2] == key]
        candidates += [name for name in same_word if len(same_word) == 1 or name == f"actor.{key}"]
    return next((name for name in candidates if name in known), None)


@cache
def constants_of(task: str) -> dict[str, Any]:
    """Return the values that code of a task finds and nobody can set, by key: see `config/declarations/calls.py`."""
    return {key: value for key, value in all_values(Run.of(task)).items() if key not in flags_of(task)}


@cache
def unknown_flag(key: str, task: str | None) -> Problem:
    """Return the problem of a key that is not a flag of `task`, or not one of any task while none is chosen."""
    if key in SECRETS:
        fix = "export WANDB_API_KEY, and set logger.wandb.enable=true"
        return Problem(key, "secrets cannot be given on the command line", fix, ("logger.wandb.enable",), "name")
    known = flags_of(task)
    owners = list_tasks_with(key) if task and entry_alone(key, known) is None else []
    close = nearest(key, known)
    guess = did_you_mean(key, known)
    if owners:
        reason = f"task={task} has no such flag; it belongs to {' or '.join(f'task={name}' for name in owners)}"
        return Problem(key, reason, f"drop it, or {guess}" if guess else "drop it", (*close,), "name")
    if (problem := old_flag(key, known) or entry_alone(key, known)) is not None:
        return problem
    if new := rename(key, known):
        return Problem(key, f"renamed to {new}", f"write {new}=...", (new,), "renamed")
    reason = f"task={task} has no such flag" if task else "no task has such a flag"
    if several := [name for name in known if name.rpartition(".")[2] == key]:
        return Problem(
            key, f"is a short name of {len(several)} flags", f"write one of {', '.join(several)}", (*several,), "name"
        )
    return Problem(key, reason, guess or f"see --help{f' task={task}' if task else ''}", (*close,), "name")


def entry_alone(key: str, known: Collection[str]) -> Problem | None:
    """Return the problem of an entry of a table that is written by itself."""
    table = next((name for name in known if key.startswith(f"{name}.")), None)
    if table is None:
        return None
    names = key.removeprefix(f"{table}.").split(".")
    value = reduce(lambda inner, name: f"{{{name}: {inner}}}", reversed(names), "...")
    return Problem(key, f"{table} takes all its entries as one value", f"write '{table}={value}'", (table,), "name")


def with_value(problem: Problem, value: object) -> Problem:
    """Return the problem of a renamed flag with the value that was given, under its name here, in the remedy."""
    if problem.kind != "renamed" or not isinstance(value, str | int | float | list):
        return problem
    (new,) = problem.meant
    info, known = flags_of(None)[new], translate_value(new, value)
    is_odd = isinstance(value, bool) != (info.type.base is bool)  # such as that of a switch for a choice
    if known is None and (is_odd or (info.meta.choices is not None and value not in info.meta.choices)):
        return problem
    text = known or spell(value, lambda words: words if PLAIN.fullmatch(words) else quote(words))
    return replace(problem, fix=f"write {shlex.quote(f'{new}={text}')}")


def old_flag(key: str, known: Collection[str]) -> Problem | None:
    """Return the problem of a flag that is called otherwise here by more than its name, or that is not needed."""
    name = key.replace("-", "_")
    words = [f"{flag}={value or '...'}" for flag, value in BECOMES.get(name, ()) if flag in known]
    if words:
        reason, remedy = "is written otherwise here", f"write {' '.join(words)}"
    elif name in NOTHING:
        reason, remedy = f"is not needed here: {NOTHING[name]}", "remove it"
    elif name in GONE:
        reason, remedy = "has no counterpart here", GONE[name]
    elif name in HINTS:
        reason, remedy = "is written otherwise here", HINTS[name]
    else:
        return None
    return Problem(key, reason, remedy, tuple(word for word in WORD.findall(remedy) if word in known), "name")
