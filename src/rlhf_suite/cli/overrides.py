"""Hydra's overrides taken apart: settings of Hydra, choices of presets, values of flags, and what cannot be read."""

from __future__ import annotations

import itertools
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException

from rlhf_suite.cli.arguments import quoted
from rlhf_suite.cli.presets import group_names
from rlhf_suite.cli.values import Value
from rlhf_suite.config.flags import kind
from rlhf_suite.config.names import SECRETS, flags_of, unknown_flag
from rlhf_suite.config.problems import Problem
from rlhf_suite.config.validate import example


@dataclass
class Overrides:
    """`settings` are Hydra's own. `choices` pick presets, `values` set flags; either may be a sweep."""

    settings: list[str] = field(default_factory=list)
    choices: list[Override] = field(default_factory=list)
    values: list[Override] = field(default_factory=list)
    problems: list[Problem] = field(default_factory=list)

    @property
    def sweeps(self) -> list[Override]:
        return [each for each in (*self.choices, *self.values) if each.is_sweep_override()]

    def choice_sets(self) -> Iterator[list[str]]:
        """Every combination of presets, task first: the others are read in its light."""
        ordered = sorted(self.choices, key=lambda each: each.key_or_group != "task")
        return map(list, itertools.product(*[[word for word, _ in alternatives(each)] for each in ordered]))

    def value_sets(self) -> Iterator[list[Value]]:
        """Every combination of values, in the order of the command line."""
        kept = [each for each in self.values if not each.is_delete()]
        options = [[(each.key_or_group, value) for _, value in alternatives(each)] for each in kept]
        return map(list, itertools.product(*[option for option in options if option]))


def sort(words: Sequence[str]) -> Overrides:
    """Sort overrides by what they do."""
    result = Overrides()
    presets = group_names()
    for word in words:
        if key_of(word).startswith(("hydra.", "hydra/")):
            result.settings.append(word)
            continue
        override = parsed(word)
        if isinstance(override, Problem):
            result.problems.append(override)
        elif override.key_or_group not in presets or isinstance(override.value(), dict):
            result.values.append(override)
        elif override.value() is None:
            result.problems.append(Problem(override.key_or_group, "a preset cannot be null", f"leave {word} away"))
        else:
            result.choices.append(override)
    result.settings.sort(key=lambda word: not word.startswith("hydra/"))
    return result


def key_of(word: str) -> str:
    return word.lstrip("+~").partition("=")[0]


def parsed(word: str) -> Override | Problem:
    """One override by Hydra's grammar."""
    key = key_of(word)
    if key in SECRETS:
        return unknown_flag(key, None)
    try:
        return parser().parse_override(word)
    except HydraException as error:
        reason = str(error).splitlines()[0].rstrip(".")
        return Problem(key, f"cannot be read: {reason}", as_text(key, word.partition("=")[2].strip("\"'")))


def as_text(key: str, value: str) -> str:
    """How to write a value that Hydra's grammar cannot read, or would read as something else than this text."""
    info = flags_of(None).get(key)
    if info is not None and kind(info.type).base is not str:
        return f"write {key}=<{kind(info.type).name}>, e.g. {shlex.quote(f'{key}={example(info)}')}"
    return f"quote the value twice: {shlex.quote(f'{key}={quoted(value)}')}"


def parser() -> OverridesParser:
    return OverridesParser.create(config_loader=GlobalHydra.instance().config_loader())


def alternatives(override: Override) -> list[tuple[str, Any]]:
    """The (word, value) pairs that an override stands for; none for a sweep that cannot be enumerated."""
    if not override.is_sweep_override():
        return [(override.input_line or "", override.value())]
    if not override.is_discrete_sweep():
        return []
    words = [f"{override.key_or_group}={value}" for value in override.sweep_string_iterator()]
    return [(word, parser().parse_override(word).value()) for word in words]
