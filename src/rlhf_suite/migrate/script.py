"""The commands of OpenRLHF in a shell script, whatever launches them, and what around them has to be said."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import PurePath

from rlhf_suite.migrate.shell import Statement, statements
from rlhf_suite.migrate.shell_text import readable, whole_number

ENTRIES = (
    "train_sft", "train_rm", "train_dpo", "train_kto", "train_prm", "train_kd", "train_ppo", "train_ppo_ray",
    "batch_inference", "serve_rm", "lora_combiner", "interactive_chat",
)  # fmt: skip
# Options of launchers that say how many processes a node has, and how many nodes there are.
PER_NODE = ("--nproc_per_node", "--nproc-per-node", "--num_gpus")
NODES = ("--nnodes", "--num_nodes")
STARTS_RANKS = ("deepspeed", "torchrun", "torch.distributed.run")
# Words before an entry point that say nothing which a new command would need.
PLAIN = (
    "python",
    "python3",
    "-m",
    "--module",
    "-u",
    "--",
    "uv",
    "run",
    "deepspeed",
    "torchrun",
    "exec",
    "nohup",
    "time",
)
PRINTS = ("echo", "printf", "cat", "grep", "ls", "cp", "mv", "rm", "pip", "git")
ELLIPSIS = re.compile(r"\.{3}|…|\[\.{3}\]")


@dataclass(frozen=True)
class Command:
    """A command of OpenRLHF: the name of its entry point, and its arguments. Numbers are None if nothing says them."""

    entry: str
    arguments: tuple[str, ...]
    is_launched: bool = False  # by deepspeed or torchrun, which start a process per GPU
    per_node: int | None = None
    nodes: int | None = None
    environment: dict[str, str] = field(default_factory=dict)
    remarks: tuple[str, ...] = ()
    lost: tuple[str, ...] = ()


def commands_in(text: str) -> list[Command]:
    """Return the commands of OpenRLHF in a script, in their order.

    Raises:
        UserError: it is not a script.
    """
    commands: list[Command] = []
    for statement in statements(text):
        command = command_of(statement)
        if command is not None:
            commands.append(command)
        elif commands and statement.words and statement.words[0].startswith("--"):
            # After a comment within a continued line a shell sees another command.
            words = join_words(statement.words)
            cut = f"line {statement.line}: {words}: no longer a part of the command above for a shell"
            commands[-1] = replace(commands[-1], lost=(*commands[-1].lost, cut))
    return commands


def command_of(statement: Statement) -> Command | None:
    """Return the command of OpenRLHF that a statement starts, whatever launches it; None if it starts none."""
    words = statement.words
    if not words or PurePath(words[0]).name in PRINTS:
        return None
    for place, word in enumerate(words):
        entry = PurePath(word).name.removesuffix(".py").rpartition(".")[2]
        if entry in ENTRIES and (word == entry or "openrlhf" in word or word.endswith(".py")):
            launcher = words[:place]
            programs = [PurePath(word).name for word in launcher]
            return Command(
                entry,
                words[place + 1 :],
                any(program in STARTS_RANKS for program in programs),
                number_of(launcher, PER_NODE),
                number_of(launcher, NODES),
                {**statement.environment, **read_assignments(launcher)},
                tuple(remarks_on(statement, launcher)),
            )
    return None


def read_assignments(launcher: Sequence[str]) -> dict[str, str]:
    """Return the variables that `env NAME=value` sets before a command."""
    if "env" not in [PurePath(word).name for word in launcher]:
        return {}
    pairs = (word.partition("=") for word in launcher if "=" in word)
    return {name: value for name, _, value in pairs if name.isidentifier()}


def remarks_on(statement: Statement, launcher: Sequence[str]) -> list[str]:
    """Return what is uncertain in a command, and what around it is not part of the new one."""
    notes = list(statement.notes)
    if not all(PurePath(word).name in PLAIN for word in launcher):
        notes.append(
            f"launched by {join_words(launcher)}: of this, only the numbers of processes and nodes are taken over"
        )
    if statement.redirections:
        notes.append(f"not taken over: {' '.join(map(readable, statement.redirections))}")
    return notes


def number_of(words: Sequence[str], options: Sequence[str]) -> int | None:
    """Return the number that a launcher's option has."""
    for place, word in enumerate(words):
        name, equals, value = word.partition("=")
        value = value if equals else (words[place + 1] if place + 1 < len(words) else "")
        if name in options and (number := whole_number(value)) is not None and number >= 0:
            return number
    return None


def join_words(words: Sequence[str]) -> str:
    """Return words as a script would have them."""
    return readable(" ".join(repr(word) if not word or " " in word else word for word in words))
