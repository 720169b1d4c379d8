"""The commands of OpenRLHF in a shell script: variables, here-documents, continued lines and launchers are resolved.

This is not a shell. Assignments of texts and whole-number arithmetic are followed, everything that needs a shell to run
(loops, command substitution, arrays) stays as it is written, and the caller says so.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePath

ENTRIES = (
    "train_sft", "train_rm", "train_dpo", "train_kto", "train_prm", "train_kd", "train_ppo", "train_ppo_ray",
    "batch_inference", "serve_rm", "lora_combiner", "interactive_chat",
)  # fmt: skip
VARIABLE = re.compile(r"\$(?:(\w+)|\{(\w+)(?::?[-=]([^}]*))?\})")
ARITHMETIC = re.compile(r"\$\(\(([\d\s+*/%()-]+)\)\)")
ASSIGNMENT = re.compile(r"(?:export\s+|declare\s+|local\s+)?(\w+)=(.*)", re.DOTALL)
ANSI_QUOTES = re.compile(r"\$'((?:[^'\\]|\\.)*)'")
HERE_DOCUMENT = re.compile(r"<<-?\s*(['\"]?)(\w+)\1")
READ_INTO = re.compile(r"\bread\b.*\s(\w+)\s*<<")
# Options of launchers that say how many processes a node has, and how many nodes there are.
PER_NODE = ("--nproc_per_node", "--nproc-per-node", "--num_gpus")
NODES = ("--nnodes", "--num_nodes")


@dataclass(frozen=True)
class Command:
    """A command of OpenRLHF: the name of its entry point, and its arguments. Numbers are None if nothing says them."""

    entry: str
    arguments: tuple[str, ...]
    is_launched: bool = False  # by deepspeed or torchrun, which start a process per GPU
    per_node: int | None = None
    nodes: int | None = None


def commands_in(text: str) -> list[Command]:
    """Return the commands of OpenRLHF in a script, in their order."""
    found = []
    for words in statements(text):
        command = command_of(words)
        if command is not None:
            found.append(command)
    return found


def statements(text: str) -> Iterator[list[str]]:
    """Yield the words of each statement, with the values of variables that the script sets."""
    known: dict[str, str] = {}
    for line, body in logical_lines(text):
        into = READ_INTO.search(line) if body is not None else None
        if into is not None:
            known[into[1]] = resolved(body or "", known)
            continue
        words = split(resolved(line, known))
        assigned = ASSIGNMENT.fullmatch(" ".join(words)) if words and "=" in words[-1] and len(words) <= 2 else None
        if assigned is None:
            yield from parts(words)
        elif "$(" not in line.replace("$((", "") and "`" not in line:  # command substitution is not followed
            known[assigned[1]] = assigned[2]


def logical_lines(text: str) -> Iterator[tuple[str, str | None]]:
    """Yield each line, joined with those that continue it, and the text of its here-document if it has one."""
    rows = iter(text.splitlines())
    for row in rows:
        line = row
        if line.lstrip().startswith("#"):
            continue
        while line.endswith("\\"):
            line = line[:-1] + " " + next(rows, "")
        while has_open_quote(line) and (following := next(rows, None)) is not None:
            line += "\n" + following
        document = HERE_DOCUMENT.search(line)
        if document is None:
            yield line, None
            continue
        body = []
        for following in rows:
            if following.strip() == document[2]:
                break
            body.append(following.rstrip("\\"))
        yield line, "\n".join(body)


def has_open_quote(line: str) -> bool:
    try:
        list(lexer_of(line))
    except ValueError:
        return True
    return False


def split(text: str) -> list[str]:
    """Return the words of a line as a shell splits it, without comments; none of a text with an open quote."""
    return [] if has_open_quote(text) else list(lexer_of(text))


def lexer_of(text: str) -> shlex.shlex:
    text = ANSI_QUOTES.sub(lambda found: shlex.quote(found[1].encode().decode("unicode_escape")), text)
    lexer = shlex.shlex(text, posix=True, punctuation_chars=";&|")
    lexer.whitespace_split = True
    lexer.commenters = "#" if re.search(r"(^|\s)#", text) else ""
    return lexer


def resolved(text: str, known: Mapping[str, str]) -> str:
    """Return a text with the values of known variables; the others stay."""

    def value(found: re.Match[str]) -> str:
        name = found[1] or found[2]
        return known.get(name, found[3] if found[3] is not None else found[0])

    return ARITHMETIC.sub(calculated, VARIABLE.sub(value, arithmetic_names(text, known)))


def arithmetic_names(text: str, known: Mapping[str, str]) -> str:
    """Return a text in which the names within `$((...))` are values: there a variable needs no dollar sign."""

    def inside(found: re.Match[str]) -> str:
        return re.sub(r"\$?\{?\b([A-Za-z_]\w*)\b\}?", lambda name: known.get(name[1], name[0]), found[0])

    return re.sub(r"\$\(\([^()]*(?:\([^()]*\)[^()]*)*\)\)", inside, text)


def calculated(found: re.Match[str]) -> str:
    """Return the value of whole-number arithmetic, or its text if it has none."""
    if "**" in found[1]:
        return found[0]
    try:
        return str(int(eval(found[1].replace("/", "//"), {"__builtins__": {}})))  # digits and signs alone
    except (ArithmeticError, SyntaxError, TypeError):
        return found[0]


def parts(words: Sequence[str]) -> Iterator[list[str]]:
    """Yield the commands of a line that `;`, `&&` and the like part."""
    part: list[str] = []
    for word in words:
        if set(word) <= set(";&|"):
            yield part
            part = []
        else:
            part.append(word)
    yield part


def command_of(words: Sequence[str]) -> Command | None:
    """Return the command of OpenRLHF that a statement starts, whatever launches it; None if it starts none."""
    for place, word in enumerate(words):
        entry = PurePath(word).name.removesuffix(".py").rpartition(".")[2]
        if entry in ENTRIES and (word == entry or "openrlhf" in word or word.endswith(".py")):
            launcher = list(words[:place])
            programs = [PurePath(each).name for each in launcher]
            return Command(
                entry,
                tuple(words[place + 1 :]),
                any(program in ("deepspeed", "torchrun", "torch.distributed.run") for program in programs),
                number_of(launcher, PER_NODE),
                number_of(launcher, NODES),
            )
    return None


def number_of(words: Sequence[str], options: Sequence[str]) -> int | None:
    """Return the number that a launcher's option has."""
    for place, word in enumerate(words):
        name, equals, value = word.partition("=")
        value = value if equals else (words[place + 1] if place + 1 < len(words) else "")
        if name in options and value.isdigit():
            return int(value)
    return None
