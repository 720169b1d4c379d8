"""What a call in Python asks for: rows and functions get files, short names become flags, and all is checked."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from os import PathLike
from pathlib import Path
from types import NoneType
from typing import Any, NamedTuple, TypeVar

from rlhf_suite.api.code import name_function
from rlhf_suite.api.rows import are_columns_or_splits, name_rows
from rlhf_suite.api.words import shorten, words_of
from rlhf_suite.composition import compose
from rlhf_suite.composition.arguments import CommandLine, key_of, parse
from rlhf_suite.composition.config_file import with_config_file
from rlhf_suite.config.check.problems import ConfigurationError, Problem
from rlhf_suite.config.declarations.runs import TASKS, flags_of
from rlhf_suite.launch.environment import limit_rights
from rlhf_suite.preflight.devices import device_problems
from rlhf_suite.preflight.inspections.inspect_runs import inspect
from rlhf_suite.preflight.inspections.model_files import files_of
from rlhf_suite.preflight.jobs import Preflight, preflight

P = TypeVar("P")
OUTPUTS = Path("outputs")  # where runs are, by default
# Short names: of the flags, the first that the task has is meant. A table of flags or a preset is none of them.
SHORT = {
    "model": ("actor.model_name_or_path", "reward.model_name_or_path"),
    "data": ("data.dataset", "data.prompt_dataset"),
    "reward": ("reward.rule",),
    "loss": ("actor.policy_loss_type", "algo.loss", "algo.divergence"),
    "estimator": ("algo.advantage.estimator",),
    "agent": ("agent.kind",),
    "callbacks": ("train.callbacks",),
    "replay": ("rollout.replay",),
    "lora_rank": ("ds.lora.rank",),
}
ALWAYS_SHORT = ("model", "data", "loss", "estimator", "callbacks", "replay", "lora_rank")  # no preset is called so

PLAIN = (NoneType, bool, int, float, str, PathLike, list, tuple, Mapping)  # values that are no object of a program


class Asked(NamedTuple):
    """A call's command line, and what it amounts to."""

    line: CommandLine
    checked: Preflight


def ask(task: str, settings: Mapping[str, Any], further: Iterable[str] = ()) -> Asked:
    """Compose and check what a call asks for. `further` are words of the command line beside those of the settings.

    Raises:
        ConfigurationError: there are mistakes in it; all of them are in its `problems`.
        UserError: a value has no form that a run can take.
    """
    check_task(task)
    forget_files()
    line = parse([*words_of(task, with_files(task, settings)), *further])
    refuse_doubles(line)
    line = with_config_file(line)
    checked = preflight(line)
    refuse(checked.problems)
    if checked.demo and not checked.is_sweep:
        line.overrides.append(f"demo={checked.demo}")
    return Asked(line, checked)


def check_task(task: Any) -> None:
    """Raise ConfigurationError if a task's name is none that a command line could have."""
    if isinstance(task, str) and re.fullmatch(r"\w+", task):
        return
    name = str(task).removeprefix("task=")
    fix = f"write only the name: rs.run({name!r}, ...)" if name in TASKS else f"choose one of {', '.join(TASKS)}"
    raise ConfigurationError.of("task", f"{task!r:.80} is not the name of a task", fix)


def refuse_doubles(line: CommandLine) -> None:
    """Raise ConfigurationError if a call sets a flag twice: nested and with dots, by a short name too, or in a grid."""
    keys = Counter(map(key_of, line.overrides))
    refuse([Problem(key, "is set twice", how_to_set_once(key)) for key, count in keys.items() if count > 1])


def how_to_set_once(key: str) -> str:
    """Return the remedy for a flag that a call sets twice."""
    names = [f"{name}=" for name, flags in SHORT.items() if key in flags]
    names += ["on_step="] if "callbacks=" in names else []
    return "give it once" + (f"; {' and '.join(names)} set{'s' if len(names) == 1 else ''} it too" if names else "")


def check_places(checked: Preflight) -> None:
    """Check the files, servers and devices of a run that was composed.

    Raises:
        ConfigurationError: something is missing or does not fit.
    """
    refuse(inspect(checked.runs))
    refuse(device_problems(checked))


def find_place(checked: Preflight, find: Callable[[Preflight], P | Problem]) -> P:
    """Check what a call asks for against this machine, and return where it writes: what `find` (`for_run`, `for_sweep`)
    makes, with the rights that launch.umask leaves.

    Raises:
        ConfigurationError: something is missing or does not fit, or the place cannot be used.
    """
    check_places(checked)
    with limit_rights(checked.runs[0].launch):
        place = find(checked)
    if isinstance(place, Problem):
        raise ConfigurationError([place])
    return place


def refuse(problems: list[Problem]) -> None:
    """Raise ConfigurationError if there are problems."""
    if problems:
        raise ConfigurationError(problems)


def forget_files() -> None:
    """Forget what earlier calls of this process have read: the files may have changed."""
    files_of.cache_clear()
    compose.compose_once.cache_clear()


def with_files(task: str, settings: Mapping[str, Any]) -> list[tuple[str, Any]]:
    """Return settings by the names of flags, with files in place of rows and functions.

    Raises:
        ConfigurationError: some have no form that a run can take; all of them are in its `problems`.
    """
    named, problems = list[tuple[str, Any]](), list[Problem]()
    for key, given in with_callbacks(settings).items():
        try:
            named += with_file(full_name(task, key, given), given)
        except ConfigurationError as error:
            problems += error.problems
    refuse(problems)
    return named


def with_callbacks(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings with one list of callbacks, of which the function `on_step` is the last."""
    on_step = settings.get("on_step")
    if isinstance(on_step, type) or not (on_step is None or callable(on_step) or isinstance(on_step, str)):
        problem, fix = (
            f"{shorten(on_step)} is not a function",
            "give a function (step, metrics, samples); classes are callbacks=",
        )
        raise ConfigurationError.of("on_step", problem, fix)
    callbacks = settings.get("callbacks")
    given = [*callbacks] if isinstance(callbacks, list | tuple) else [] if callbacks is None else [callbacks]
    given += [] if on_step is None else [on_step]
    others = {key: value for key, value in settings.items() if key not in ("callbacks", "on_step")}
    return {**others, "callbacks": given} if given else others


def full_name(task: str, key: str, value: Any) -> str:
    """Return the flag that a short name means."""
    flags = flags_of(task if task in TASKS else None)
    meant = next((flag for flag in SHORT.get(key, ()) if flag in flags), None)
    is_short = key in ALWAYS_SHORT and not isinstance(value, Mapping)
    is_short |= is_own_code(value) or (key == "data" and are_columns_or_splits(value))
    return meant if meant is not None and is_short else key


def is_own_code(value: Any) -> bool:
    """Return whether a value is code of one's own: a function, a class or another object, its file, or a list of it."""
    if isinstance(value, list | tuple):
        return any(map(callable, value))
    return ".py:" in value if isinstance(value, str) else not isinstance(value, PLAIN)


def with_file(key: str, value: Any) -> Iterator[tuple[str, Any]]:
    """Yield a setting, or those of a table, with the name of a file in place of rows or a function."""
    if isinstance(value, Mapping) and key not in flags_of(None):
        for name, inner in value.items():
            yield from with_file(f"{key}.{name}", inner)
    elif value is None or isinstance(value, str | PathLike):
        yield key, value
    elif key.endswith("dataset"):
        yield key, name_rows(key, value, OUTPUTS / "data")
    elif key.endswith("model_name_or_path"):
        fix = "give a name of the hub, a folder (of model.save_pretrained), or the run that made it"
        raise ConfigurationError.of(key, f"{shorten(value)} is not the name or the folder of a model", fix)
    elif isinstance(value, list | tuple):
        yield key, [name_code(key, item) if is_code(key, item) else item for item in value]
    else:
        yield key, name_code(key, value) if is_code(key, value) else value


def is_code(key: str, value: Any) -> bool:
    """Return whether the value of a flag is to be named as code: a function, or any object where code is expected."""
    info = flags_of(None).get(key)
    is_expected = info is not None and info.meta.algorithms is not None
    return callable(value) or (is_expected and not isinstance(value, PLAIN))


def name_code(key: str, value: Callable[..., Any]) -> str:
    """Return the name of a function or class that is given as the value of a flag.

    Raises:
        ConfigurationError: the flag takes none, or other processes could not import it.
    """
    info = flags_of(None).get(key)
    if key == "train.agent_func_path":  # a file, in which the class or function is found by its form
        return name_function(key, value, OUTPUTS / "code").rpartition(":")[0]
    if info is not None and info.meta.algorithms is None:
        problem, fix = (
            f"takes no function or class, but this is {shorten(value)}",
            "docs/own_code.md has the flags that do",
        )
        raise ConfigurationError.of(key, problem, fix)
    return name_function(key, value, OUTPUTS / "code")
