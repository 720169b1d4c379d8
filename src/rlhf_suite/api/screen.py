"""Where a run that Python has started shows itself: on the output, or in a notebook as a picture that changes."""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from html import escape
from typing import Any, Protocol

LINES, LIMIT = 15, 20_000  # of what was printed: lines in a notebook, and characters that are kept


class Result(Protocol):
    """A run or a sweep."""

    def stamp(self) -> object:
        """Return what changes when there is more to see."""

    def _repr_html_(self) -> str: ...


@dataclass
class Screen:
    """Shows what a process prints, and keeps the end of it. In a notebook it shows the result as it changes, with the
    last lines below it: the table and the curves of a run, or the table of a sweep."""

    result: Result
    said: str = ""
    handle: Any = field(default=None)
    seen: object = field(default=None)

    def __post_init__(self) -> None:
        if in_notebook():
            from IPython.display import display

            self.handle = display(self, display_id=True)

    def write(self, text: str) -> None:
        """Show a text that the process has printed; empty: nothing, but there may be more to see of the result."""
        self.said = (self.said + text)[-LIMIT:]
        if self.handle is None:
            encoding = getattr(sys.stdout, "encoding", None) or "utf-8"
            sys.stdout.write(text.encode(encoding, "backslashreplace").decode(encoding))
            sys.stdout.flush()
        elif text or self.seen != self.result.stamp():
            self.seen = self.result.stamp()
            self.handle.update(self)

    def last_lines(self, count: int) -> str:
        """Return the last lines that the process has printed."""
        return "\n".join(self.said.strip().splitlines()[-count:])

    def _repr_html_(self) -> str:
        return f"{self.result._repr_html_()}<pre>{escape(self.last_lines(LINES))}</pre>"


def in_notebook() -> bool:
    """Return whether this is the process of a notebook."""
    python = sys.modules.get("IPython")
    shell = None if python is None else python.get_ipython()
    return hasattr(shell, "kernel")
