"""Text from elsewhere (models, rewards, servers, files, actors), made safe to show on a console or in a report."""

from __future__ import annotations

import os
import re
import traceback
import unicodedata
from functools import lru_cache
from pathlib import Path

LIMIT = 1000
SECRET_NAMES = re.compile(r"KEY|TOKEN|SECRET|PASS|CREDENTIAL|PIN", re.IGNORECASE)  # of environment variables
# Of fields of requests and of parameters of addresses: api_key, access-token
SECRET_FIELD = re.compile(
    r"(?:.*[._-])?(?:api)?(?:key|token|secret|password|passwd|authorization|auth|signature|sig)", re.IGNORECASE
)
SHORTEST_SECRET, LONGEST_SECRET = 6, 4096  # characters
PASSWORD_OF_ADDRESS = re.compile(r"(?<=://)[^\s/]*@")  # to the last @: a password may have one too
NOT_OF_USER = (Path(__file__).parent, Path(traceback.__file__).parent)  # the suite, and the library of Python
# Control characters, formatting that reorders or hides text, surrogates, line and paragraph separators.
INVISIBLE = frozenset({"Cc", "Cf", "Cs", "Zl", "Zp"})
JOINERS = "\u200c\u200d"  # Persian and emoji need them, and they do not reorder text


def printable(text: str, limit: int = LIMIT, keep_lines: bool = False) -> str:
    """Return `text` safe for display: characters that act on a terminal are written as escapes, and the length is
    bounded.

    A control character becomes `\\x1b`, a lone surrogate `\\ud800`, a line end `\\n`; with `keep_lines` line ends and
    tabs stay. A text longer than `limit` characters is cut and ends with "... (N characters)", where N is its whole
    length. Secrets are not shown (`hide_secrets`). Data files keep the text unchanged: this is only for the console,
    logs, `status.json` and reports.
    """
    kept = JOINERS + "\n\t" * keep_lines
    shown = hide_secrets(text[: limit + LONGEST_SECRET])[:limit]
    bare = shown.replace("\n", "").replace("\t", "") if keep_lines else shown
    if not bare.isprintable():
        shown = "".join(char if char in kept or is_visible(char) else escape(char) for char in shown)
    return shown if len(text) <= limit else f"{shown}... ({len(text)} characters)"


def hide_secrets(text: str) -> str:
    """Return a text, which may quote a server or the error of a client, without the values of environment variables
    whose names are those of keys, and without the names and passwords in addresses."""
    for name, value in os.environ.items():
        if is_secret(name, value):
            text = text.replace(value, f"<{name}>").replace(repr(value)[1:-1], f"<{name}>")
    return PASSWORD_OF_ADDRESS.sub("<password>@", text)


@lru_cache(maxsize=1024)
def is_secret(name: str, value: str) -> bool:
    """Return whether the value of an environment variable may be a key: not a path, and no word that others have."""
    is_path = value.startswith("/") and os.path.exists(value)  # noqa: PTH110 (which never raises)
    return len(value) >= SHORTEST_SECRET and not is_path and SECRET_NAMES.search(name) is not None


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
