"""`rlhf-suite report <run folder...>`: the page of a run, or of several runs beside each other."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from rlhf_suite.errors import RunError, UserError

USAGE = """usage: rlhf-suite report <run folder>                      writes <run folder>/report.html
       rlhf-suite report <sweep folder>                  writes <sweep folder>/report.html: means over seeds, all runs
       rlhf-suite report <run folder> <run folder> ...   writes report.html in this folder: the runs beside each other
       ... -o <file>                                     writes this file instead

The page is one file that needs neither a server nor the network: curves, times, samples and configuration. A run writes
it at its end; this command writes it again, also for a run that works or was killed."""

DONE, FAILED, REFUSED = 0, 1, 2


def report(words: Sequence[str]) -> int:
    """Write the page that a command line asks for; return the exit code."""
    folders, target, problem = parsed(words)
    if problem or not folders:
        asked = problem == "help"
        print(USAGE, file=sys.stdout if asked else sys.stderr)
        return DONE if asked else REFUSED
    from rlhf_suite.report.html import write_report
    from rlhf_suite.sweeps.table import write_sweep_page
    from rlhf_suite.tracking.sweep_folder import read

    places, file = [Path(each).expanduser() for each in folders], Path(target).expanduser() if target else None
    try:
        sweep = read(places[0]) if len(places) == 1 else None
        path = write_report(places, file) if sweep is None or sweep.is_single else write_sweep_page(sweep, file)
    except UserError as error:
        print(error, file=sys.stderr)
        return REFUSED
    except RunError as error:
        print(error, file=sys.stderr)
        return FAILED
    print(f"Report: {path} ({path.stat().st_size / 1e6:.1f} MB)")
    return DONE


def parsed(words: Sequence[str]) -> tuple[list[str], str | None, str]:
    """Return the folders, the file to write, and what is wrong: "" if nothing is, "help" if help is asked for."""
    folders, target, left = list[str](), None, iter(words)
    for word in left:
        if word in ("-h", "--help"):
            return [], None, "help"
        if word == "-o":
            target = next(left, None)
            if target is None:
                return [], None, "no file"
        elif word.startswith("-"):
            return [], None, f"unknown option {word}"
        else:
            folders.append(word)
    return folders, target, ""
