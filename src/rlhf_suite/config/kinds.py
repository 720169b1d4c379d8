"""The types a flag can have, taken apart: `list[float] | None` is a list of float that may be null."""

from __future__ import annotations

import types
from dataclasses import dataclass
from typing import Any, Union, get_args, get_origin


@dataclass(frozen=True)
class Kind:
    """A flag's type: `base` is bool, int, float, str or list; a list has an `item` type."""

    base: type
    item: type | None
    optional: bool

    @property
    def name(self) -> str:
        """As users read it, e.g. `list[float] or null`."""
        name = self.base.__name__ if self.item is None else f"list[{self.item.__name__}]"
        return f"{name} or null" if self.optional else name

    @property
    def scalar(self) -> type:
        """The type of the flag, or of each item of its list."""
        return self.item or self.base


def kind(hint: Any) -> Kind:
    """Take a resolved type hint apart."""
    optional = False
    if get_origin(hint) in (Union, types.UnionType):
        (hint,) = (part for part in get_args(hint) if part is not type(None))
        optional = True
    if get_origin(hint) is list:
        return Kind(list, get_args(hint)[0], optional)
    return Kind(hint, None, optional)
