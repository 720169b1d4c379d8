"""The names in `key=value` words: flags, sections mistaken for flags, and keys that do not exist."""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator
from typing import Any

from hydra.core.override_parser.types import Override, OverrideType

from rlhf_suite.config.flags import FlagInfo
from rlhf_suite.config.formatting import did_you_mean
from rlhf_suite.config.names import flags_of, unknown_flag
from rlhf_suite.config.problems import Problem

Value = tuple[str, Any]


def flattened(values: Iterable[Value], flags: Container[str]) -> Iterator[Value]:
    """`algo={kl: {init_coef: 0}}` as its single values; a table that is a flag is one."""
    for key, value in values:
        if isinstance(value, dict) and key not in flags:
            yield from flattened(((f"{key}.{name}", inner) for name, inner in value.items()), flags)
        else:
            yield key, value


def name_problems(override: Override, task: str | None) -> Iterator[Problem]:
    """What is wrong with the key of an override, whatever its value."""
    flags = flags_of(task)
    for key, value in flattened([(override.key_or_group, override.value())], flags):
        if override.is_delete():
            yield Problem(key, "flags cannot be deleted", f"leave ~{key} away, or set it to null")
        elif key in flags:
            if override.type == OverrideType.ADD:
                yield Problem(key, "is a flag already", f"drop the +: {key}=...")
        else:
            yield not_a_flag(key, value, task, flags)


def not_a_flag(key: str, value: object, task: str | None, flags: dict[str, FlagInfo]) -> Problem:
    """A value for a whole section (with a dot, or with a slash as if it had presets), or an unknown key."""
    dotted = key.replace("/", ".")
    section = [info for name, info in flags.items() if name.startswith(f"{dotted}.")]
    if not section and key == dotted:
        return unknown_flag(key, task)
    what = "is a section, not a flag" if key == dotted else "is no group of presets; flags are written with dots"
    for info in section:
        if info.meta.choices and value in info.meta.choices:
            return Problem(key, what, f"did you mean {info.key}={value}?")
    if section:
        names = ", ".join(info.key for info in section[:4])
        return Problem(key, what, f"set one of {names}{', ...' if len(section) > 4 else ''}")
    return Problem(key, what, did_you_mean(dotted, flags) or "see --info defaults")
