"""Values and bounds as one writes them on the command line and in messages."""

from __future__ import annotations

import ast
from typing import Any

from rlhf_suite.config.flags import FlagInfo, Meta, kind

BOUNDS = (
    ("gt", "> ", lambda value, bound: value > bound),
    ("ge", ">= ", lambda value, bound: value >= bound),
    ("lt", "< ", lambda value, bound: value < bound),
    ("le", "<= ", lambda value, bound: value <= bound),
)


def spelled(value: Any) -> str:
    """null, true, [0.9,0.95], {a: {b: 1}}, text."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, list):
        return f"[{','.join(spelled(item) for item in value)}]"
    if isinstance(value, dict):
        return f"{{{', '.join(f'{name}: {spelled(item)}' for name, item in value.items())}}}"
    return str(value)


def shown(value: Any) -> str:
    """As `spelled`, with quotes around a text so that its ends are seen."""
    return spelled(value) if not isinstance(value, str) else repr(value)


def bounds(meta: Meta) -> str:
    """E.g. ` > 0 and <= 1`; empty without bounds."""
    parts = [f"{sign}{getattr(meta, name)}" for name, sign, _ in BOUNDS if getattr(meta, name) is not None]
    return f" {' and '.join(parts)}" if parts else ""


def described(info: FlagInfo) -> str:
    """Type and allowed values, e.g. `float > 0` or `k1 | k2 | k3`."""
    expected = kind(info.type)
    if info.meta.choices is None:
        return expected.name + bounds(info.meta)
    names = [*map(str, info.meta.choices), *(["<file.py>:<function>"] if info.meta.algorithms is not None else [])]
    return " | ".join(names) + (" or null" if expected.optional else "")


def literal(text: str) -> object:
    """The value that a text spells: true, false, null, a number, or text."""
    words: dict[str, object] = {"true": True, "false": False, "null": None}
    if text.lower() in words:
        return words[text.lower()]
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text
