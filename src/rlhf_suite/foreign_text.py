"""Text that others wrote (models, rewards, servers, files, actors), made safe to show on a console or in a report."""

from __future__ import annotations

import unicodedata

LIMIT = 1000
# Control characters, formatting that reorders or hides text, surrogates, line and paragraph separators.
INVISIBLE = frozenset({"Cc", "Cf", "Cs", "Zl", "Zp"})
JOINERS = "\u200c\u200d"  # Persian and emoji need them, and they move nothing


def printable(text: str, limit: int = LIMIT, keep_lines: bool = False) -> str:
    """Return `text` as it may be shown: what acts on a terminal is written as an escape, and the length is bounded.

    A control character becomes `\\x1b`, a lone surrogate `\\ud800`, a line end `\\n`; with `keep_lines` line ends and
    tabs stay. After `limit` characters of the text comes "... (N characters)", where N is the length of the whole.
    Data files keep the text as it is: this is for the console, logs, `status.json` and reports only.
    """
    kept = JOINERS + "\n\t" * keep_lines
    shown = text[:limit]
    if not shown.isprintable():
        shown = "".join(char if char in kept or is_visible(char) else escaped(char) for char in shown)
    return shown if len(text) <= limit else f"{shown}... ({len(text)} characters)"


def is_visible(char: str) -> bool:
    """Return whether a terminal shows this character, rather than obeying it or failing to encode it."""
    return unicodedata.category(char) not in INVISIBLE


def escaped(char: str) -> str:
    """Return the character as Python would write it in a string: `\\x1b`."""
    return char.encode("unicode_escape").decode("ascii")
