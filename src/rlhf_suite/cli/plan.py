"""`rlhf-suite plan <words>`, or `plan=true` among the words of a run: what it will need, before it waits in a queue."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from rlhf_suite.composition.arguments import PLAN_OPTIONS
from rlhf_suite.errors import UserError

if TYPE_CHECKING:
    from rlhf_suite.composition.arguments import CommandLine
    from rlhf_suite.preflight.jobs import Preflight

SYNOPSIS = "rlhf-suite plan [--gpu NAME] [--memory GIB] [--mfu SHARE] [--tflops N] <words of a command line>"
ABOUT = """Says what memory each process of a run takes, and what disk and time it needs, without running it. The model
needs no weights, only its config.json, and the GPUs need not be here. The exit code is 0 if the run fits, 1 if it does
not (then with changes that make it fit), and 2 if the command line is wrong. plan=true on the command line of a run
does the same without these options."""

OPTIONS = argparse.ArgumentParser("rlhf-suite plan", SYNOPSIS, ABOUT, allow_abbrev=False)
for name, (kind, help) in PLAN_OPTIONS.items():
    OPTIONS.add_argument(name, type=kind, help=help)
USAGE = OPTIONS.format_help().rstrip()

FITS, TOO_LARGE, REFUSED = 0, 1, 2


def main(words: Sequence[str]) -> int:
    """Print the plan of the run that the words make; return the exit code."""
    from rlhf_suite.composition.arguments import parse
    from rlhf_suite.composition.config_file import with_config_file
    from rlhf_suite.preflight.jobs import preflight

    asked, rest = OPTIONS.parse_known_args(list(words))
    line = with_config_file(parse(rest))
    return print_plan(line, preflight(line), asked)


def print_plan(line: CommandLine, checked: Preflight, asked: argparse.Namespace | None = None) -> int:
    """Print the plan of a checked run, or of the first one of a sweep; return the exit code.

    `asked` are the options of `rlhf-suite plan`; None: those of `plan=true`, which has none.
    """
    from rich.console import Console

    from rlhf_suite.api.plans import Devices, plan_run

    try:
        planned = plan_run(line, checked, Devices(**vars(asked or OPTIONS.parse_args([]))))
        planned.show(Console())
    except UserError as error:
        print(error, file=sys.stderr)
        return REFUSED
    if checked.first_of_several:
        print(checked.first_of_several)
    return FITS if planned.fits else TOO_LARGE
