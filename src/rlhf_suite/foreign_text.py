"""Text from elsewhere (models, rewards, servers, files, actors), made safe to show on a console or in a report."""

from __future__ import annotations

import traceback
import unicodedata
from pathlib import Path

LIMIT = 1000
NOT_OF_USER = (Path(__file__).parent, Path(traceback.__file__).parent)  # the suite, and the library of Python
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
        shown = "".join(char if char in kept or is_visible(char) else escape(char) for char in shown)
    return shown if len(text) <= limit else f"{shown}... ({len(text)} characters)"


def describe(error: BaseException) -> str:
    """Return what an exception says, and where the code of the user was, as `file.py:12: KeyError: 'x'`: its innermost
    line outside of libraries and the suite, if there is one."""
    where = line_of_user(error)
    return printable(f"{where}: {what_of(error)}" if where else what_of(error), keep_lines=True)


def what_of(error: BaseException) -> str:
    """Return the kind of an exception and what it says."""
    return f"{type(error).__name__}: {error}"


def line_of_user(error: BaseException) -> str:
    """Return where the code of the user was when an exception was raised, as `file.py:12`; empty if nowhere."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if is_of_user(Path(frame.filename))]
    return f"{Path(frames[-1].filename).name}:{frames[-1].lineno}" if frames else ""


def is_of_user(file: Path) -> bool:
    """Return whether a file belongs neither to a library nor to the suite."""
    installed = {"site-packages", "dist-packages"} & {*file.parts} or file.name.startswith("<frozen ")
    return not installed and not any(file.is_relative_to(folder) for folder in NOT_OF_USER)


def is_visible(char: str) -> bool:
    """Return whether a terminal shows this character, instead of obeying it or failing to encode it."""
    return unicodedata.category(char) not in INVISIBLE


def escape(char: str) -> str:
    """Return the character as a Python escape: `\\x1b`."""
    return char.encode("unicode_escape").decode("ascii")
