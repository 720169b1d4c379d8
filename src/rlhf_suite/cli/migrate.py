"""`rlhf-suite migrate <script or command>`: commands of OpenRLHF as command lines of this suite, with what differs."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from rlhf_suite.errors import UserError
from rlhf_suite.migrate.command import Migrated
from rlhf_suite.migrate.convert import command_line
from rlhf_suite.migrate.convert import migrate as converted
from rlhf_suite.migrate.script import ENTRIES, Command, commands_in

CONVERTED, INCOMPLETE = 0, 1
USAGE = """usage: rlhf-suite migrate <script.sh>           a shell script with commands of OpenRLHF; - is stdin
       rlhf-suite migrate <words of a command>  e.g. deepspeed --module openrlhf.cli.train_sft --max_len 2048 ...

Prints a shell script: the same commands for this suite. Its comments say what differs (docs/from_openrlhf.md) and what
is lost. The exit code is 0 if nothing is lost and the new commands pass all checks of their flags, else 1."""


def main(words: Sequence[str]) -> int:
    """Convert a script or a command; return the exit code."""
    if not words:
        raise UserError(USAGE)
    try:
        commands = commands_in(text_of(words))
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{words[0]} cannot be read: {error}") from error
    if not commands:
        raise UserError(f"No command of OpenRLHF is in it. Known are: {', '.join(ENTRIES)}")
    return max([show(converted(command), command) for command in commands])


def text_of(words: Sequence[str]) -> str:
    """Return the text of the script, or of the command that the words are."""
    if list(words) == ["-"]:
        return sys.stdin.read()
    if len(words) == 1 and (Path(words[0]).suffix == ".sh" or Path(words[0]).is_file()):
        return Path(words[0]).read_text()
    return words[0] if len(words) == 1 else shlex.join(words)


def show(new: Migrated, command: Command) -> int:
    """Print one new command; return the exit code."""
    problems = list(refusals(new))
    print(f"# {command.entry}")
    for text in (*(f"LOST: {text}" for text in new.lost), *new.remarks, *(f"TO DO: {text}" for text in problems)):
        print(f"#   {text}")
    print(f"{command_line(new)}\n")
    return INCOMPLETE if new.lost or problems else CONVERTED


def refusals(new: Migrated) -> Iterator[str]:
    """Yield what the checks of flags say about the new command."""
    from rlhf_suite.composition.arguments import parse
    from rlhf_suite.preflight.jobs import preflight

    for problem in preflight(parse(new.words)).problems:
        yield f"{problem.key}: {problem.what}; {problem.fix}"
