"""Text from elsewhere (models, rewards, servers, files, actors), made safe to show on a console or in a report."""

from __future__ import annotations

import unicodedata

LIMIT = 1000
# Control characters, formatting that reorders or hides text, surrogates, line and paragraph separators.
INVISIBLE = frozenset({"Cc", "Cf", "Cs", "Zl", "Zp"})
JOINERS = "\u200c\u200d"  # Persian and emoji need them, and they do not reorder text


def printable(text: str, limit: int = LIMIT, keep_lines: bool = False) -> str:
    """Return `text` safe for display: characters that act on a terminal are written as escapes, and the length is
    bounded.

    A control character becomes `\\x1b`, a lone surrogate `\\ud800`, a line end `\\n`; with `keep_lines` line ends and
    tabs stay. A text longer than `limit` characters is cut and ends with "... (N characters)", where N is its whole
    length. Data files keep the text unchanged: this is only for the console, logs, `status.json` and reports.
    """
    kept = JOINERS + "\n\t" * keep_lines
    shown = text[:limit]
    bare = shown.replace("\n", "").replace("\t", "") if keep_lines else shown
    if not bare.isprintable():
        shown = "".join(char if char in kept or is_visible(char) else escaped(char) for char in shown)
    return shown if len(text) <= limit else f"{shown}... ({len(text)} characters)"


def is_visible(char: str) -> bool:
    """Return whether a terminal shows this character, instead of obeying it or failing to encode it."""
    return unicodedata.category(char) not in INVISIBLE


def escaped(char: str) -> str:
    """Return the character as a Python escape: `\\x1b`."""
    return char.encode("unicode_escape").decode("ascii")
