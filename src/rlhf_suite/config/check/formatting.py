"""Values and bounds as one writes them on the command line and in messages, and the nearest of several names."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from difflib import SequenceMatcher
from typing import Any

from rlhf_suite.config.declarations.flag_types import spell
from rlhf_suite.config.declarations.flags import FlagInfo, Meta

BOUNDS: tuple[tuple[str, str, Callable[[float, float], bool]], ...] = (
    ("gt", "> ", lambda value, bound: value > bound),
    ("ge", ">= ", lambda value, bound: value >= bound),
    ("lt", "< ", lambda value, bound: value < bound),
    ("le", "<= ", lambda value, bound: value <= bound),
)


def number_of(count: int, thing: str) -> str:
    """Return a number of things in words, e.g. `1 rank` or `2 ranks`."""
    return f"{count} {thing}" if count == 1 else f"{count} {thing}s"


def quote(text: str) -> str:
    """Return a text as a value that Hydra's grammar reads back unchanged: backslashes before a quote are doubled."""
    return '"' + re.sub(r'(\\*)("|$)', lambda match: match[1] * 2 + match[2].replace('"', '\\"'), text) + '"'


def show_value(value: Any) -> str:
    """Return a value as `spell` does, with quotes around a text so that its ends are visible."""
    return spell(value) if not isinstance(value, str) else repr(value)


def bounds(meta: Meta) -> str:
    """Return the bounds in words, e.g. ` > 0 and <= 1`; an empty text without bounds."""
    parts = [f"{sign}{getattr(meta, name)}" for name, sign, _ in BOUNDS if getattr(meta, name) is not None]
    return f" {' and '.join(parts)}" if parts else ""


def describe_type(info: FlagInfo) -> str:
    """Return the type and the allowed values, e.g. `float > 0` or `k1 | k2 | k3`."""
    if info.meta.choices is None:
        return info.type.name + bounds(info.meta)
    names = [*map(str, info.meta.choices), *(["<file.py>:<function>"] if info.meta.algorithms is not None else [])]
    return " | ".join(names) + (" or null" if info.type.optional else "")


def nearest(word: str, names: Iterable[str], count: int = 3, least: float = 0.6) -> list[str]:
    """Return the names most like `word`: 0.6 x likeness of the whole + 0.4 x that of the part after the last dot."""

    def likeness(name: str) -> float:
        whole = SequenceMatcher(None, word, name).ratio()
        return 0.6 * whole + 0.4 * SequenceMatcher(None, word.rpartition(".")[2], name.rpartition(".")[2]).ratio()

    scored = sorted(((likeness(name), name) for name in names), key=lambda pair: -pair[0])
    return [name for score, name in scored[:count] if score >= least]


def did_you_mean(word: str, names: Iterable[str], before: str = "") -> str | None:
    """Return `did you mean a? (also close: b, c)`, or None when no name is near; with a text that stands before the
    name, such as `flag=`, `did you mean flag=a?`."""
    close = nearest(word, names)
    if not close:
        return None
    return f"did you mean {before}{close[0]}?" + (f" (also close: {', '.join(close[1:])})" if close[1:] else "")


def next_multiple(number: int, factor: int) -> int:
    """Return the smallest multiple of `factor` that is at least `number`."""
    return -(-number // factor) * factor
