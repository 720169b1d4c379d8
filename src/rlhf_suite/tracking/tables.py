"""The console, and tables on it in which no name of a flag is broken, so that it can be copied."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Sequence
from io import StringIO

from rich.console import Console
from rich.table import Table
from rich.text import Text

FLAG = re.compile(r"[a-z]\w*(?:[./]\w+)+(?==)|[a-z]\w*(?:\.\w+)+")
WIDTH = 120  # characters of a line of a text
UNBOUNDED = 100_000  # characters of a line that nothing has to fit
BREAKABLE = 12  # characters of a word that is not a flag, in the narrowest column


def open_console() -> Console:
    """Return the console of the output. What is not a terminal, such as a pipe or a file, has lines of any length: no
    value in a table is broken there, unless COLUMNS says how wide it is."""
    console = Console()
    if not (console.is_terminal or console.is_jupyter or "COLUMNS" in os.environ):
        console.width = UNBOUNDED
    return console


def as_text(show: Callable[[Console], object]) -> str:
    """Return what `show` prints to a console, without colours."""
    written = StringIO()
    show(Console(file=written, width=WIDTH, no_color=True, force_terminal=False))
    return written.getvalue()


def show_table(console: Console, title: str | Text, columns: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """Print a table. On a console that is too narrow for the names of flags in it, the lines are longer than it is."""
    table = Table(title=title, title_justify="left")
    cells = [tuple(columns), *map(tuple, rows)]
    widths = column_widths(cells, console.width)
    for name, width in zip(columns, widths, strict=True):
        table.add_column(name, overflow="fold", width=width)
    for row in cells[1:]:
        table.add_row(*map(Text, row))  # a value such as [q_proj] is not markup
    console.width = max(console.width, sum(widths) + 3 * len(widths) + 1)
    console.print(table)


def column_widths(cells: list[tuple[str, ...]], room: int) -> list[int]:
    """Return the widths of columns: what their flags need at least, and more from the left where there is room."""
    columns = list(zip(*cells, strict=True))
    widths = [max(map(longest_name, column)) for column in columns]
    spare = room - sum(widths) - 3 * len(widths) - 1
    for place, column in enumerate(columns):
        more = max(0, min(spare, max(map(len, column)) - widths[place]))
        widths[place] += more
        spare -= more
    return widths


def longest_name(text: str) -> int:
    """Return the width that a text needs at least: that of its longest flag, and of other words only a part."""
    return max(map(least_width, text.split()), default=1)


def least_width(word: str) -> int:
    """Return the width that a word needs: a flag with its value, or without it if it is a path; else a part."""
    flag = FLAG.match(word)
    if flag is None or (flag.end() < len(word) and word[flag.end()] != "="):
        return min(len(word), BREAKABLE)
    return flag.end() + 1 if "/" in word[flag.end() :] else len(word)
