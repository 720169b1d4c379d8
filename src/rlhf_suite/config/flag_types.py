"""The types a flag can have, taken apart: `list[float] | None` is a list of float that may be null.

`dict[str, Section]` is a table of named entries, each with the flags of a section.
"""

from __future__ import annotations

import types
from dataclasses import dataclass, fields
from typing import Any, Union, get_args, get_origin


@dataclass(frozen=True)
class Kind:
    """A flag's type: `base` is bool, int, float, str, list or dict; `item` is what a list or a table holds."""

    base: type
    item: type | None
    optional: bool

    @property
    def name(self) -> str:
        """As users read it, e.g. `list[float] or null`."""
        if self.base is dict:
            return f"{{name: {{{', '.join(field.name for field in fields(self.section))}}}}}"
        name = self.base.__name__ if self.item is None else f"list[{self.item.__name__}]"
        return f"{name} or null" if self.optional else name

    @property
    def scalar(self) -> type:
        """The type of the flag, or of each item of its list."""
        return self.item or self.base

    @property
    def section(self) -> type:
        """The section of a table's entries."""
        assert self.base is dict and self.item is not None
        return self.item


def kind(hint: Any) -> Kind:
    """Take a resolved type hint apart."""
    optional = False
    if get_origin(hint) in (Union, types.UnionType):
        (hint,) = (part for part in get_args(hint) if part is not type(None))
        optional = True
    if get_origin(hint) is list:
        return Kind(list, get_args(hint)[0], optional)
    if get_origin(hint) is dict:
        return Kind(dict, get_args(hint)[1], optional)
    return Kind(hint, None, optional)
