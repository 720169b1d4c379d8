"""Hydra's overrides taken apart: settings of Hydra, choices of presets, values of flags, and what cannot be read."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException

from rlhf_suite.cli.compose import groups
from rlhf_suite.config.names import SECRETS, unknown_flag
from rlhf_suite.config.problems import Problem

Value = tuple[str, Any]


@dataclass(frozen=True)
class Overrides:
    """`settings` are Hydra's own. `choices` pick presets, `values` set flags; either may be a sweep."""

    settings: list[str]
    choices: list[Override]
    values: list[Override]
    problems: list[Problem]

    @property
    def sweeps(self) -> list[Override]:
        return [each for each in (*self.choices, *self.values) if each.is_sweep_override()]

    def choice_sets(self) -> Iterator[list[str]]:
        """Every combination of presets, task first: the others are read in its light."""
        ordered = sorted(self.choices, key=lambda each: each.key_or_group != "task")
        return map(list, itertools.product(*[[word for word, _ in alternatives(each)] for each in ordered]))

    def value_sets(self) -> Iterator[list[Value]]:
        """Every combination of values, in the order of the command line."""
        options = [[(each.key_or_group, value) for _, value in alternatives(each)] for each in self.values]
        return map(list, itertools.product(*[option for option in options if option]))


def sort(words: Sequence[str]) -> Overrides:
    """Sort overrides by what they do."""
    presets = groups()
    settings, choices, values, problems = [], [], [], []
    for word in words:
        key = word.lstrip("+~").partition("=")[0]
        if key.startswith(("hydra.", "hydra/")):
            settings.append(word)
            continue
        override = parsed(word)
        if isinstance(override, Problem):
            problems.append(override)
        elif is_choice(override, presets):
            (problems if override.value() is None else choices).append(empty(override) or override)
        else:
            values.append(override)
    settings.sort(key=lambda word: not word.startswith("hydra/"))
    return Overrides(settings, choices, values, problems)


def parsed(word: str) -> Override | Problem:
    """One override by Hydra's grammar."""
    key = word.lstrip("+~").partition("=")[0]
    if key in SECRETS:
        return unknown_flag(key, None)
    try:
        return parser().parse_override(word)
    except HydraException as error:
        reason = str(error).splitlines()[0].rstrip(".")
        value = word.partition("=")[2].strip("\"'")
        return Problem(key, f"cannot be read: {reason}", f"""quote the value twice: '{key}="{value}"'""")


def parser() -> OverridesParser:
    return OverridesParser.create(config_loader=GlobalHydra.instance().config_loader())


def is_choice(override: Override, presets: list[str]) -> bool:
    return override.key_or_group in presets and not isinstance(override.value(), dict)


def empty(override: Override) -> Problem | None:
    """`experiment=null`: nothing is chosen by leaving the word away."""
    if override.value() is not None:
        return None
    return Problem(override.key_or_group, "a preset cannot be null", f"leave {override.input_line} away")


def alternatives(override: Override) -> list[tuple[str, Any]]:
    """The (word, value) pairs that an override stands for; none for a sweep that cannot be enumerated."""
    if not override.is_sweep_override():
        return [(override.input_line or "", override.value())]
    if not override.is_discrete_sweep():
        return []
    words = [f"{override.key_or_group}={value}" for value in override.sweep_string_iterator()]
    return [(word, parser().parse_override(word).value()) for word in words]


def quoted(text: str) -> str:
    """A text as a value that Hydra's grammar reads back unchanged."""
    escaped = text.replace("\\", "\\\\").replace('"', '\\"') if '"' in text or text.endswith("\\") else text
    return f'"{escaped}"'
