"""What a call in Python asks for: rows and functions get files, short names become flags, and all is checked."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Mapping
from os import PathLike
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from rlhf_suite.api.code import name_function
from rlhf_suite.api.words import words_of
from rlhf_suite.composition import compose
from rlhf_suite.composition.arguments import CommandLine, parse
from rlhf_suite.composition.config_file import with_config_file
from rlhf_suite.config.check.problems import ConfigurationError, Problem
from rlhf_suite.config.declarations.runs import TASKS, flags_of
from rlhf_suite.disk import write_text
from rlhf_suite.errors import UserError
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
}
ALWAYS_SHORT = ("model", "data", "loss", "estimator", "callbacks", "replay")  # no preset has such a name


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
    forget_files()
    line = with_config_file(parse([*words_of(task, with_files(task, settings)), *further]))
    checked = preflight(line)
    refuse(checked.problems)
    if checked.demo and not checked.is_sweep:
        line.overrides.append(f"demo={checked.demo}")
    return Asked(line, checked)


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


def with_files(task: str, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings by the names of flags, with files in place of rows and functions."""
    return {
        name: value
        for key, given in with_callbacks(settings).items()
        for name, value in with_file(full_name(task, key, given), given)
    }


def with_callbacks(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings with one list of callbacks, of which the function `on_step` is the last."""
    given = [name for key in ("callbacks", "on_step") if (value := settings.get(key)) is not None
             for name in (value if isinstance(value, list | tuple) else [value])]  # fmt: skip
    others = {key: value for key, value in settings.items() if key not in ("callbacks", "on_step")}
    return {**others, "callbacks": given} if given else others


def full_name(task: str, key: str, value: Any) -> str:
    """Return the flag that a short name means."""
    flags = flags_of(task if task in TASKS else None)
    meant = next((flag for flag in SHORT.get(key, ()) if flag in flags), None)
    is_short = callable(value) or (key in ALWAYS_SHORT and not isinstance(value, Mapping))
    return meant if meant is not None and is_short else key


def with_file(key: str, value: Any) -> Iterable[tuple[str, Any]]:
    """Yield a setting, or those of a table, with the name of a file in place of rows or a function."""
    if isinstance(value, Mapping) and key not in flags_of(None):
        for name, inner in value.items():
            yield from with_file(f"{key}.{name}", inner)
    elif callable(value):
        yield key, name_code(key, value)
    elif isinstance(value, list) and any(map(callable, value)):
        yield key, [name_code(key, item) if callable(item) else item for item in value]
    elif key.endswith("dataset") and value is not None and not isinstance(value, str | PathLike):
        yield key, name_rows(key, value, OUTPUTS / "data")
    else:
        yield key, value


def name_code(key: str, value: Callable[..., Any]) -> str:
    """Return the name of a function or class that is given as the value of a flag.

    Raises:
        UserError: the flag takes none, or other processes could not import it.
    """
    info = flags_of(None).get(key)
    if key == "train.agent_func_path":  # a file, in which the class or function is found by its form
        return name_function(key, value, OUTPUTS / "code").rpartition(":")[0]
    if info is not None and info.meta.algorithms is None:
        raise UserError(f"{key}: this flag takes no function. docs/own_code.md lists those that do")
    return name_function(key, value, OUTPUTS / "code")


def name_rows(key: str, rows: Iterable[Any], folder: Path) -> str:
    """Write rows to `folder` and return the file's name, which has their hash: the same rows are the same data.

    Raises:
        UserError: a row is no dict of what JSON has, or there are none.
    """
    lines = [line_of(key, number, row) for number, row in enumerate(rows, 1)]
    if not lines:
        raise UserError(f"{key}: there are no rows. Give a list of dicts, a data set or a path")
    written = "".join(lines)
    file = folder / f"rows_{hashlib.sha256(written.encode()).hexdigest()[:12]}.jsonl"
    folder.mkdir(parents=True, exist_ok=True)
    if not file.exists():
        write_text(file, written)
    return str(file)


def line_of(key: str, number: int, row: Any) -> str:
    """Return one row as a line of JSON."""
    if not isinstance(row, Mapping):
        raise UserError(f"{key}: row {number} is a {type(row).__name__}. Each row is a dict, such as {{'prompt': ...}}")
    try:
        return json.dumps(dict(row), ensure_ascii=False) + "\n"
    except TypeError as error:
        raise UserError(f"{key}: row {number}: {error}. Give texts, numbers, lists and dicts, or a path") from None
