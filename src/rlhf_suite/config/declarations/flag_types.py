"""The type of a flag, read from the annotation of its declaration."""

from __future__ import annotations

import ast
import dataclasses
import types
from collections.abc import Callable
from dataclasses import dataclass, fields
from functools import cache
from typing import Any, Union, get_args, get_origin, get_type_hints


@dataclass(frozen=True)
class FlagType:
    """A flag's type: `base` is bool, int, float, str, list or dict; `item` is what a list or a table holds."""

    base: type
    item: type | None
    optional: bool

    @property
    def name(self) -> str:
        """As users read it, e.g. `list[float] or null`."""
        if self.is_table:
            return f"{{name: {{{', '.join(field.name for field in fields(self.section))}}}}}"
        if self.base is dict:
            return "{name: value}"
        name = self.base.__name__ if self.item is None else f"list[{self.item.__name__}]"
        return f"{name} or null" if self.optional else name

    @property
    def is_table(self) -> bool:
        """Whether the flag holds named entries that are sections of flags."""
        return self.base is dict and dataclasses.is_dataclass(self.item)

    @property
    def scalar(self) -> type:
        """The type of the flag, or of each item of its list."""
        return self.item or self.base

    @property
    def section(self) -> type:
        """The section of a table's entries."""
        assert self.is_table and self.item is not None
        return self.item


def flag_type(hint: Any) -> FlagType:
    """Take a resolved type hint apart."""
    optional = False
    if get_origin(hint) in (Union, types.UnionType):
        (hint,) = (part for part in get_args(hint) if part is not type(None))
        optional = True
    if get_origin(hint) is list:
        return FlagType(list, get_args(hint)[0], optional)
    if get_origin(hint) is dict:
        return FlagType(dict, get_args(hint)[1], optional)
    return FlagType(hint, None, optional)


@cache
def field_types(section: type) -> dict[str, FlagType]:
    """Return the types of the fields of a section."""
    return {name: flag_type(hint) for name, hint in get_type_hints(section).items()}


def literal(text: str) -> object:
    """Return the value that a text stands for: true, false, null, a number, or the text itself."""
    words: dict[str, object] = {"true": True, "false": False, "null": None}
    if text.lower() in words:
        return words[text.lower()]
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text


def spell(value: Any, text: Callable[[str], str] = str) -> str:
    """Return a value as one writes it on the command line: null, true, [0.9,0.95], {a: {b: 1}}, text. `text=quoted`:
    as Hydra's grammar reads it back unchanged."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, list):
        return f"[{','.join(spell(item, text) for item in value)}]"
    if isinstance(value, dict):
        return f"{{{', '.join(f'{name}: {spell(item, text)}' for name, item in value.items())}}}"
    return text(value) if isinstance(value, str) else str(value)
