"""Hydra's overrides taken apart: settings of Hydra, choices of presets, values of flags, and what cannot be read."""

from __future__ import annotations

import itertools
import re
import shlex
from collections.abc import Container, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override, OverrideType
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf

from rlhf_suite.composition.arguments import key_of
from rlhf_suite.composition.presets import group_names, preset_names
from rlhf_suite.config.check.formatting import did_you_mean, nearest, quote
from rlhf_suite.config.check.names import SECRETS, unknown_flag, with_value
from rlhf_suite.config.check.problems import Problem
from rlhf_suite.config.check.validate import example
from rlhf_suite.config.declarations.flags import FlagInfo
from rlhf_suite.config.declarations.runs import flags_of

Value = tuple[str, Any]
FREE_SETTINGS = "hydra.launcher.slurm_additional_parameters"  # a table whose names are Slurm's


@dataclass
class Overrides:
    """`settings` are Hydra's own. `choices` pick presets, `values` set flags; either may be a sweep."""

    settings: list[str] = field(default_factory=list)
    choices: list[Override] = field(default_factory=list)
    values: list[Override] = field(default_factory=list)
    problems: list[Problem] = field(default_factory=list)
    own_presets: Path | None = None

    @property
    def sweeps(self) -> list[Override]:
        return [choice for choice in (*self.choices, *self.values) if choice.is_sweep_override()]

    @property
    def chosen(self) -> set[str]:
        """The groups of which a preset is chosen."""
        return {choice.key_or_group for choice in self.choices}

    def choice_sets(self) -> Iterator[list[str]]:
        """Yield every combination of presets, task first: the others are read in its light."""
        ordered = sorted(self.choices, key=lambda choice: choice.key_or_group != "task")
        return map(list, itertools.product(*[[word for word, _ in alternatives(choice)] for choice in ordered]))

    def value_sets(self) -> Iterator[dict[str, Value]]:
        """Yield every combination of values by their words, in the order of the command line."""
        kept = [override for override in self.values if not override.is_delete()]
        options = [
            [(word, (override.key_or_group, value)) for word, value in alternatives(override)] for override in kept
        ]
        return map(dict, itertools.product(*[option for option in options if option]))


def sort(words: Sequence[str], own: Path | None = None) -> Overrides:
    """Sort overrides by what they do; `own` is the folder of the user's presets, which may have groups of its own."""
    result = Overrides(own_presets=own)
    for word in words:
        if key_of(word).startswith(("hydra.", "hydra/")):
            is_new = key_of(word).startswith(FREE_SETTINGS)  # a key that Hydra adds only if it is asked to
            result.settings.append(f"++{word.lstrip('+')}" if is_new else word)
            continue
        override = parse_override(word)
        if isinstance(override, Problem):
            result.problems.append(override)
        elif not is_group(override, own) or isinstance(override.value(), dict):
            result.values.append(override)
        elif override.value() is None:
            result.problems.append(Problem(override.key_or_group, "a preset cannot be null", f"remove {word}"))
        else:
            result.choices.append(override)
    result.settings.sort(key=lambda word: not word.startswith("hydra/"))
    return result


def is_group(override: Override, own: Path | None) -> bool:
    """Return whether an override chooses presets: of a group of the menu, or of one of the user's, which is added to
    the menu in Hydra's way: `+mine=a`, or `+mine@algo.kl=a` for another place."""
    group = override.key_or_group
    return group in group_names() or (override.type == OverrideType.ADD and own is not None and (own / group).is_dir())


def parse_override(word: str) -> Override | Problem:
    """Return one override by Hydra's grammar."""
    key = key_of(word)
    if key in SECRETS:
        return unknown_flag(key, None)
    try:
        return parse_one(word)
    except HydraException as error:
        reason = str(error).splitlines()[0].rstrip(".")
        return Problem(key, f"cannot be read: {reason}", as_text(key, word.partition("=")[2].strip("\"'")))


def as_text(key: str, value: str) -> str:
    """Return how to write a value that Hydra's grammar cannot read, or would read as something else than this text."""
    info = flags_of(None).get(key)
    if info is not None and info.type.base is not str:
        return f"write {key}=<{info.type.name}>, e.g. {shlex.quote(f'{key}={example(info)}')}"
    return f"quote the value twice: {shlex.quote(f'{key}={quote(value)}')}"


def parse_one(word: str) -> Override:
    """Return one override, which knows the presets that `glob(...)` chooses from. Raises HydraException."""
    loader = GlobalHydra.instance().config_loader()
    override = OverridesParser.create(config_loader=loader).parse_override(word)
    override.config_loader = loader  # Hydra sets it in lists of overrides alone
    return override


def alternatives(override: Override) -> list[tuple[str, Any]]:
    """Return the (word, value) pairs that an override stands for; none for a sweep that cannot be enumerated."""
    if not override.is_sweep_override():
        return [(override.input_line or "", override.value())]
    if not override.is_discrete_sweep():
        return []
    words = [f"{override.key_or_group}={value}" for value in override.sweep_string_iterator()]
    return [(word, parse_one(word).value()) for word in words]


def flatten(values: Iterable[Value], flags: Container[str]) -> Iterator[Value]:
    """Yield `algo={kl: {init_coef: 0}}` as its single values; a table that is a flag is one value."""
    for key, value in values:
        if isinstance(value, dict) and key not in flags:
            yield from flatten(((f"{key}.{name}", inner) for name, inner in value.items()), flags)
        else:
            yield key, value


def name_problems(override: Override, task: str | None) -> Iterator[Problem]:
    """Yield what is wrong with the key of an override, whatever its value."""
    flags = flags_of(task)
    for key, value in flatten([(override.key_or_group, override.value())], flags):
        if override.is_delete():
            yield Problem(key, "flags cannot be deleted", f"remove ~{key}, or set it to null")
        elif key in flags:
            if override.type == OverrideType.ADD:
                yield Problem(key, "is a flag already", f"remove the +: {key}=...")
        else:
            yield not_a_flag(key, value, task, flags)


def not_a_flag(key: str, value: object, task: str | None, flags: dict[str, FlagInfo]) -> Problem:
    """Return the problem of a value for a whole section, of a dot where a preset has a slash, or of an unknown key."""
    dotted = key.replace("/", ".")
    section = [info for name, info in flags.items() if name.startswith(f"{dotted}.")]
    if not section and key == dotted:
        return with_value(unknown_flag(key, task), value)
    group = dotted.replace(".", "/")
    if key == dotted and group in group_names():
        problem = f"is a section; its presets are chosen with {group}="
    else:
        problem = (
            "is a section, not a flag" if key == dotted else "is not a group of presets; flags are written with dots"
        )
    for info in section:
        if info.meta.choices and value in info.meta.choices:
            preset = f", or the preset {group}={value}" if str(value) in preset_names(group) else ""
            return Problem(key, problem, f"did you mean {info.key}={value}?{preset}", (info.key,), "name")
    if section:
        names = ", ".join(info.key for info in section[:4])
        several = f"set one of {names}{', ...' if len(section) > 4 else ''}"
        return Problem(key, problem, several, tuple(info.key for info in section[:4]), "name")
    fix = did_you_mean(dotted, flags) or "see --info defaults"
    return Problem(key, problem, fix, (*nearest(dotted, flags),), "name")


def with_sweep_params(given: Overrides, hydra: DictConfig) -> Overrides:
    """Add the sweep that a preset holds in hydra.sweeper.params; the command line wins over it."""
    params = OmegaConf.select(hydra, "sweeper.params") or {}
    taken = {choice.key_or_group for choice in (*given.choices, *given.values)}
    extra = sort([f"{key}={value}" for key, value in params.items() if key not in taken])
    return replace(given, choices=[*extra.choices, *given.choices], values=[*extra.values, *given.values])


def without_sweeps(given: Overrides) -> Overrides:
    """Return the overrides without those that have several values."""
    return replace(
        given,
        choices=[choice for choice in given.choices if not choice.is_sweep_override()],
        values=[value for value in given.values if not value.is_sweep_override()],
    )


def endless(override: Override) -> Problem:
    """Return the problem of values without end, of which the sweeper `basic` cannot try every one."""
    key, _, value = (override.input_line or "").partition("=")
    fix = f"give values, {key}=<a>,<b>; or install a sweeper that chooses, and add hydra/sweeper=<name> (optuna)"
    return Problem(key, f"{value} has no end of values", fix)


def list_empty(given: Overrides) -> Iterator[Problem]:
    """Yield the problem of each `glob(...)` that no preset matches, so that the sweep would have no jobs."""
    for override in given.sweeps:
        if override.is_discrete_sweep() and not alternatives(override):
            key, _, value = (override.input_line or "").partition("=")
            names = ", ".join(preset_names(key, given.own_presets))
            if names:
                yield Problem(key, f"no preset matches {value}", f"correct the pattern; the presets are {names}")
            else:
                problem = f"{value} chooses among presets, and {key} has none"
                yield Problem(key, problem, f"give values, {key}=<a>,<b>")


def several_values(override: Override) -> Problem:
    """Return the problem of commas outside of quotes and brackets: what else could be meant depends on the flag."""
    key, _, value = (override.input_line or "").partition("=")
    info = flags_of(None).get(key)
    base = str if info is None else info.type.base
    meant = "give one value"
    if base is list:
        meant = f"a list is '{key}=[{value}]'"
    elif base is str:
        meant = f"""write '{key}="{value.replace('"', "")}"' for one text"""
    elif re.fullmatch(r"-?\d{1,3}(,\d{3})+", value):
        meant = f"write {key}={value.replace(',', '')} for one number"
    return Problem(key, f"{value} are several values", f"{meant}; a sweep needs -m")
