"""How a flag is declared: one dataclass field with its type, default, help and bounds; `walk` lists them all."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, get_type_hints

# What a flag may do when a run is continued: change without a word, change when ckpt.allow_changes names it, or never.
FREE, NAMED, FIXED = "free", "named", "fixed"


@dataclass(frozen=True)
class Meta:
    """What a flag says about itself beyond its type: a sentence of help, allowed values, bounds; `resume`: whether a
    continued run may have another value."""

    help: str
    choices: tuple[str | int, ...] | None = None
    gt: float | None = None
    ge: float | None = None
    lt: float | None = None
    le: float | None = None
    resume: str = NAMED


@dataclass(frozen=True)
class FlagInfo:
    """One flag of a task: its dotted key, resolved type, default, `Meta`, and the dataclass that declares it."""

    key: str
    type: Any
    default: Any
    meta: Meta
    owner: type


def flag(  # noqa: PLR0913
    default: Any,
    help: str,
    *,
    choices: tuple[str | int, ...] | None = None,
    gt: float | None = None,
    ge: float | None = None,
    lt: float | None = None,
    le: float | None = None,
    resume: str = NAMED,
) -> Any:
    """Declare a flag. A list or dict default is copied for each instance. `choices` and bounds hold for each item."""
    meta = {"meta": Meta(help, choices, gt, ge, lt, le, resume)}
    if isinstance(default, list | dict):
        return dataclasses.field(default_factory=partial(type(default), default), metadata=meta)
    return dataclasses.field(default=default, metadata=meta)


def group(cls: type, **defaults: Any) -> Any:
    """Declare a section of flags, with other defaults than its class where a task needs them."""
    return dataclasses.field(default_factory=partial(cls, **defaults))


def walk(config: Any, prefix: str = "") -> Iterator[FlagInfo]:
    """Every flag below a section class or instance (an instance shows its task's own defaults)."""
    instance = config() if isinstance(config, type) else config
    hints = get_type_hints(type(instance))
    for field in dataclasses.fields(instance):
        value = getattr(instance, field.name)
        key = f"{prefix}{field.name}"
        if "meta" in field.metadata:
            yield FlagInfo(key, hints[field.name], value, field.metadata["meta"], type(instance))
        else:
            yield from walk(value, f"{key}.")


def by_section(infos: Iterable[FlagInfo]) -> dict[str, list[FlagInfo]]:
    """Flags under the key of their section ("" for the root's own), sections in order of appearance."""
    sections: dict[str, list[FlagInfo]] = {}
    for info in infos:
        sections.setdefault(info.key.rpartition(".")[0], []).append(info)
    return sections
