"""Commands of OpenRLHF as command lines of this suite, with what differs: `rlhf-suite migrate <script or command>`."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from rlhf_suite.config.declarations.runs import flags_of
from rlhf_suite.errors import UserError
from rlhf_suite.migrate.command import Migrated
from rlhf_suite.migrate.convert import command_line
from rlhf_suite.migrate.convert import migrate as converted
from rlhf_suite.migrate.script import ENTRIES, Command, commands_in
from rlhf_suite.migrate.shell_text import VARIABLE, is_open, readable
from rlhf_suite.migrate.shell_words import MAX_CHARACTERS
from rlhf_suite.migrate.table import table

CONVERTED, INCOMPLETE = 0, 1


def convert(words: Sequence[str], as_table: bool) -> int:
    """Print what becomes of the commands in a script, or of the command that the words are; return the exit code."""
    try:
        commands = commands_in(text_of(words))
    except UnicodeDecodeError:
        raise UserError(
            f"{words[0]} is not text in UTF-8. Name the shell script, or write the command itself"
        ) from None
    except OSError as error:
        problem = f"{words[0]} cannot be read (seen from {Path.cwd()}): {error.strerror}"
        raise UserError(f"{problem}. Check the path and its permissions, or write the command itself") from None
    if not commands:
        raise UserError(f"No command of OpenRLHF is in it. Known are: {', '.join(ENTRIES)}")
    return max(show(converted(command), command, as_table) for command in commands)


def text_of(words: Sequence[str]) -> str:
    """Return the text of the script, or of the command that the words are; a single word may be either."""
    if list(words) == ["-"]:
        return sys.stdin.read(MAX_CHARACTERS + 1)
    if len(words) > 1:
        return shlex.join(words)
    if is_name_of_file(words[0]):
        path = Path(words[0])
        if path.exists() and not path.is_file():
            raise UserError(f"{path} is not a file; give a shell script")
        with path.open(encoding="utf-8") as file:
            return file.read(MAX_CHARACTERS + 1)
    return words[0]


def is_name_of_file(word: str) -> bool:
    """Return whether a word names a file, and is not a whole command."""
    if Path(word).suffix in (".sh", ".slurm", ".sbatch") and not any(sign.isspace() for sign in word):
        return True
    try:
        return Path(word).exists()
    except (OSError, ValueError):  # such as a name that is too long
        return False


def show(new: Migrated, command: Command, as_table: bool) -> int:
    """Print one new command, or what became of the flags of the old one; return the exit code."""
    problems = list(refusals(new))
    if as_table:
        print(f"{command.entry}: task={new.task}\n\n{table(new)}\n")
        return INCOMPLETE if new.lost or problems else CONVERTED
    print(f"# {command.entry}")
    for text in (*(f"LOST: {text}" for text in new.lost), *new.remarks, *(f"TO DO: {text}" for text in problems)):
        print(f"#   {' '.join(readable(text).split())}")
    print(f"{command_line(new)}\n")
    return INCOMPLETE if new.lost or problems else CONVERTED


def refusals(new: Migrated) -> Iterator[str]:
    """Yield what the checks of flags say about the new command, apart from flags with a variable of the shell: what
    has one is a text to them, or the default if it is not of texts."""
    from rlhf_suite.composition.arguments import parse
    from rlhf_suite.preflight.jobs import preflight

    open_flags = [key for key, value in new.flags.items() if is_open(value)]
    words = [
        f"task={new.task}",
        *(
            f"{key}={VARIABLE.sub('variable', value)}"
            for key, value in new.flags.items()
            if key not in open_flags or flags_of(new.task)[key].type.base in (str, dict)
        ),
    ]
    for problem in preflight(parse(words)).problems:
        if problem.key not in open_flags:
            yield f"{problem.key}: {problem.what}; {problem.fix}"
