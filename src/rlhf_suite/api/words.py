"""Settings of Python written as the words of a command line, so that both mean the same."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rlhf_suite.composition.presets import group_names
from rlhf_suite.config.check.formatting import quote
from rlhf_suite.config.declarations.flag_types import spell
from rlhf_suite.config.declarations.runs import flags_of
from rlhf_suite.errors import UserError

OPTIONS = {"config_dir": "--config-dir", "config": "--config"}


def words_of(task: str, settings: Mapping[str, Any]) -> list[str]:
    """Return the words for a task and its settings: flags, with dots (`{"actor.adam.lr": 1e-6}`) or nested
    (`actor={"adam": {"lr": 1e-6}}`), presets (`experiment="grpo"`, `{"algo/advantage": "rloo"}`), and the options
    `config_dir` and `config`.

    Raises:
        UserError: a value cannot be written on a command line.
    """
    return [f"task={task}", *(word for key, value in settings.items() for word in words(key, value))]


def words(key: str, value: Any) -> Iterator[str]:
    """Yield the words of one setting."""
    if key in OPTIONS:
        if value is not None:
            yield f"{OPTIONS[key]}={os.fspath(value)}"
    elif isinstance(value, Mapping) and key not in flags_of(None):
        for name, inner in value.items():
            yield from words(f"{key}.{name}", inner)
    elif key in group_names() or key.startswith("hydra/"):
        yield f"{key}={spell(value)}"
    else:
        yield f"{key}={spell(plain(key, value), quote)}"


def words_of_values(key: str, values: Sequence[Any]) -> str:
    """Return the word for a flag or group that has several values in a sweep.

    Raises:
        UserError: a value cannot be written on a command line.
    """
    return f"{key}={','.join(word.partition('=')[2] for value in values for word in words(key, value))}"


def plain(key: str, value: Any) -> Any:
    """Return a value made of what YAML has: numbers, texts, lists and tables.

    Raises:
        UserError: it has no such form.
    """
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if isinstance(value, list | tuple):
        return [plain(key, item) for item in value]
    if isinstance(value, Mapping):
        return {str(name): plain(key, item) for name, item in value.items()}
    if hasattr(value, "item") and getattr(value, "ndim", None) == 0:  # a number of NumPy or PyTorch
        return value.item()
    raise UserError(
        f"{key}={value!r}: a {type(value).__name__} is not a value of a flag. Give a number, a text, a list or a dict"
    )
