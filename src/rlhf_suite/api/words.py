"""Settings of Python written as the words of a command line, so that both mean the same."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from rlhf_suite.composition.presets import group_names
from rlhf_suite.config.check.formatting import quote
from rlhf_suite.config.check.problems import ConfigurationError
from rlhf_suite.config.declarations.flag_types import spell
from rlhf_suite.config.declarations.runs import flags_of

OPTIONS = {"config_dir": "--config-dir", "config": "--config"}
NAME = re.compile(r"[+~]{0,2}\w[\w./@:-]*")
NO_CHOICE = re.compile(r"[\s=,'\"()\[\]{}]")  # what the name of a preset does not have
MOST_BYTES = 131_071  # of a word of a command line, by Linux


def words_of(task: str, settings: Iterable[tuple[str, Any]]) -> list[str]:
    """Return the words for a task and its settings: flags, with dots (`("actor.adam.lr", 1e-6)`) or nested
    (`("actor", {"adam": {"lr": 1e-6}})`), presets (`("experiment", "grpo")`, `("algo/advantage", "rloo")`), and the
    options `config_dir` and `config`.

    Raises:
        ConfigurationError: a name or a value cannot be written on a command line.
    """
    return [f"task={task}", *(word for key, value in settings for word in words(key, value))]


def words(key: str, value: Any) -> Iterator[str]:
    """Yield the words of one setting."""
    if not NAME.fullmatch(key):
        raise ConfigurationError.of(
            key, "is not the name of a flag", "write it as docs/flags.md does, as actor.adam.lr"
        )
    if key in OPTIONS:
        if value is not None:
            yield f"{OPTIONS[key]}={path_of(key, value)}"
        return
    if isinstance(value, Mapping) and key not in flags_of(None):
        for name, inner in value.items():
            yield from words(f"{key}.{name}", inner)
        return
    if key in group_names() or key.startswith("hydra/"):
        word = f"{key}={spell(choice(key, value))}"
    else:
        word = f"{key}={spell(plain(key, value), quote)}"
    if (size := len(word.encode(errors="replace"))) > MOST_BYTES:
        fix = f"write it into a file of flags and give config=<file>, or shorten it to {MOST_BYTES} bytes"
        raise ConfigurationError.of(key, f"has {size} bytes, which no process can be started with", fix)
    yield word


def choice(key: str, value: Any) -> Any:
    """Return the name of a preset, or several.

    Raises:
        ConfigurationError: it is no name.
    """
    named = plain(key, value)
    if isinstance(named, str) and "," in named:
        names = [name.strip() for name in named.split(",")]
        raise ConfigurationError.of(
            key, f"{named!r:.80} are several presets", f"use rs.sweep(grid={{{key!r}: {names}}})"
        )
    if isinstance(named, str) and (NO_CHOICE.search(named) or not named):
        raise ConfigurationError.of(
            key, f"{named!r:.80} is not the name of a preset", "write one of docs/configuration.md"
        )
    return named


def path_of(key: str, value: Any) -> str:
    """Return the text of a path.

    Raises:
        ConfigurationError: it is none.
    """
    if not isinstance(value, str | os.PathLike):
        raise ConfigurationError.of(key, f"{shorten(value)} is not a path", "give a text or a pathlib.Path")
    path = os.fspath(value)
    return check_text(key, path if isinstance(path, str) else os.fsdecode(path))


def words_of_values(key: str, values: Sequence[Any]) -> str:
    """Return the word for a flag or group that has several values in a sweep.

    Raises:
        ConfigurationError: a value cannot be written on a command line.
    """
    return f"{key}={','.join(word.partition('=')[2] for value in values for word in words(key, value))}"


def plain(key: str, value: Any) -> Any:
    """Return a value made of what YAML has: numbers, texts, lists and tables.

    Raises:
        ConfigurationError: it has no such form.
    """
    if value is None or isinstance(value, bool | int | float):
        return value
    if isinstance(value, str):
        return check_text(key, value)
    if isinstance(value, os.PathLike):
        return path_of(key, value)
    if isinstance(value, list | tuple | range):
        return [plain(key, item) for item in value]
    if isinstance(value, Mapping):
        return {str(name): plain(key, item) for name, item in value.items()}
    if hasattr(value, "tolist") and not isinstance(value, type):  # of NumPy, PyTorch or pandas
        return plain(key, value.tolist())
    fix = "give a number, a text, a list or a dict"
    raise ConfigurationError.of(key, f"{shorten(value)} is not a value of a flag", fix)


def check_text(key: str, text: str) -> str:
    """Return a text that a process can be started with.

    Raises:
        ConfigurationError: it is none.
    """
    try:
        if b"\0" not in os.fsencode(text):
            return text
    except UnicodeEncodeError:
        pass
    problem = f"{text!r:.80} has a zero byte, or half of a surrogate pair"
    raise ConfigurationError.of(key, problem, "remove it: no process can be started with such a text")


def shorten(value: Any) -> str:
    """Return how a message names a value: by its text, or by its type where that is long or says where it is stored."""
    text = repr(value)
    kind = value.__name__ if isinstance(value, type) else type(value).__name__
    is_short = len(text) <= 60 and text.isprintable() and " at 0x" not in text
    return f"the class {kind}" if isinstance(value, type) else text if is_short else f"an object of type {kind}"
