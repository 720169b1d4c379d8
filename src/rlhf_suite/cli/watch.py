"""`rlhf-suite watch <folder...>`: the page of runs in a browser, refreshed while they go on."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rlhf_suite.errors import UserError

USAGE = """usage: rlhf-suite watch <run folder>                      the page of a run
       rlhf-suite watch <sweep folder>                    that of a sweep, and one of each of its runs
       rlhf-suite watch <folder>                          the runs in a folder beside each other, and one page of each
       rlhf-suite watch <run folder> <run folder> ...     these runs
       ... --port <number>                                a port of your choice; a free one if it is left out

Prints an address of this machine, for a browser on it, and serves the page of `rlhf-suite report` there until Ctrl-C.
It shows new steps a few seconds after they end. Nobody can open it without the address, and it gives out nothing but
the page. From another computer: ssh -L <port>:127.0.0.1:<port> <this machine>, then open the same address there."""


def main(words: Sequence[str]) -> int:
    """Serve the page that a command line asks for until a signal asks to stop; return the exit code."""
    from rlhf_suite.api.runs import choose_runs
    from rlhf_suite.report.watch import watch

    folders, port = parse_words(words)
    watch(lambda: choose_runs(folders), port)
    return 0


def parse_words(words: Sequence[str]) -> tuple[list[Path], int]:
    """Return the folders and the port, 0 where none is named.

    Raises:
        UserError: there are no folders, the port is not one, or there is an option that does not exist.
    """
    folders, port, left = list[Path](), 0, iter(words)
    for word in left:
        if word == "--port":
            number = next(left, "")
            if not (number.isascii() and number.isdecimal() and len(number) < 6 and int(number) < 2**16):
                raise UserError(f"--port {number}: give a number from 0 (a free port) to 65535")
            port = int(number)
        elif word.startswith("-"):
            raise UserError(USAGE)
        else:
            folders.append(Path(word).expanduser())
    if not folders:
        raise UserError(USAGE)
    return folders, port
