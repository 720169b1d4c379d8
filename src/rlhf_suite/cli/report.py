"""`rlhf-suite report <run folder...>`: the page of a run, or of several runs beside each other."""

from __future__ import annotations

from collections.abc import Sequence

from rlhf_suite.errors import UserError

USAGE = """usage: rlhf-suite report <run folder>                      writes <run folder>/report.html
       rlhf-suite report <sweep folder>                  writes <sweep folder>/report.html: means over seeds, all runs
       rlhf-suite report <run folder> <run folder> ...   writes report.html in this folder: the runs beside each other
       ... -o <file>                                     writes this file instead

The page is one file that needs neither a server nor the network: curves, times, samples and configuration. A run writes
it at its end; this command writes it again, also for a run that works or was killed."""


def main(words: Sequence[str]) -> int:
    """Write the page that a command line asks for; return the exit code."""
    from rlhf_suite.api.runs import write_report

    folders, target = parse_words(words)
    path = write_report(*folders, file=target)
    print(f"Report: {path} ({path.stat().st_size / 1e6:.1f} MB)")
    return 0


def parse_words(words: Sequence[str]) -> tuple[list[str], str | None]:
    """Return the folders, and the file to write where one is named.

    Raises:
        UserError: there are no folders, or there is an option that does not exist.
    """
    folders, target, left = list[str](), None, iter(words)
    for word in left:
        if word == "-o" and (name := next(left, None)) is not None:
            target = name
        elif word.startswith("-"):
            raise UserError(USAGE)
        else:
            folders.append(word)
    if not folders:
        raise UserError(USAGE)
    return folders, target
