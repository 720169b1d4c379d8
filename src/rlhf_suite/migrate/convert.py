"""A command of OpenRLHF (0.8 to 0.11, flat or dotted flags) becomes a command line of this suite.

Most flags have one name here, which `config/names.py` knows. This file has the others: those whose value changes, that
become several flags, that need nothing here, or that have no counterpart. No flag is passed over in silence: each ends
as a word of the new command line, as a remark, or in the list of what is lost.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence

from rlhf_suite.config.names import flags_of, renamed
from rlhf_suite.migrate import fork
from rlhf_suite.migrate.combinations import COMBINATIONS
from rlhf_suite.migrate.command import Migrated, Old, joined
from rlhf_suite.migrate.handlers import HANDLERS
from rlhf_suite.migrate.script import Command

TASKS = {
    "train_sft": "sft",
    "train_rm": "rm",
    "train_dpo": "dpo",
    "train_kto": "kto",
    "train_prm": "prm",
    "train_kd": "distill",
    "train_ppo": "ppo",
    "train_ppo_ray": "ppo",
    "serve_rm": "serve_rm",
    "lora_combiner": "merge_lora",
    "interactive_chat": "chat",
}
SUPERVISED = ("sft", "rm", "dpo", "kto", "prm", "distill")


def migrate(command: Command) -> Migrated:
    """Convert a command of OpenRLHF."""
    flags = flags_in(command.arguments)
    old = Old(command.entry, task_of(command.entry, flags), {name: values for name, values in flags.items() if name})
    new = Migrated(old.entry, old.task)
    for word in flags.get("", ()):
        new.lost.append(f"{word}: no flag is before it")
    for name, values in old.flags.items():
        convert(new, old, name, values)
    add_ranks(new, command)
    for rule in COMBINATIONS:
        rule(new, old)
    return new


def flags_in(arguments: Sequence[str]) -> dict[str, list[str]]:
    """Return the flags of a command with their values; words before the first flag are under an empty name."""
    found: dict[str, list[str]] = {}
    name = ""
    for word in arguments:
        if word.startswith("--"):
            name, equals, value = word[2:].partition("=")
            name = name.replace("-", "_")
            found[name] = [value] if equals else []
        else:
            found.setdefault(name, []).append(word)
    return found


def task_of(entry: str, flags: Mapping[str, Sequence[str]]) -> str:
    """Return the task that does what an entry point does."""
    if entry == "batch_inference":
        return "score" if "rm" in flags.get("eval_task", ()) else "generate"
    return TASKS[entry]


def convert(new: Migrated, old: Old, name: str, values: Sequence[str]) -> None:
    """Convert one flag."""
    known = flags_of(old.task)
    handler = HANDLERS.get(name) or fork.HANDLERS.get(name)
    if handler is not None:
        handler(new, old, values)
        return
    key = name if name in known else renamed(name, known)
    if key is not None:
        new.add(key, joined(values, key, old.task))
    elif any(name in flags_of(task) or renamed(name, flags_of(task)) for task in TASKS.values()):
        new.lost.append(f"--{name}: task={old.task} has no such flag")
    else:
        new.lost.append(f"--{name}: no counterpart is known")


def command_line(new: Migrated, width: int = 100) -> str:
    """Return the command as a shell reads it, a few flags on a line. A `$variable` that is not set stays one."""
    lines, line = [], f"python run.py task={new.task}"
    for word in new.words[1:]:
        text = in_shell(word)
        if len(line) + len(text) > width:
            lines.append(line)
            line = "   "
        line += f" {text}"
    return " \\\n".join([*lines, line])


def in_shell(word: str) -> str:
    """Return a word as a shell reads it back, apart from variables that the script did not set."""
    if "\n" in word:
        escaped = word.replace("\\", "\\\\").replace("'", "\\'").replace("\n", "\\n")
        return f"$'{escaped}'"
    return f'"{word}"' if "$" in word and '"' not in word else shlex.quote(word)


def add_ranks(new: Migrated, command: Command) -> None:
    """A launcher starts a process per GPU; here flags say how many."""
    if new.task in SUPERVISED:
        if command.per_node is not None:
            new.add("actor.num_gpus_per_node", str(command.per_node))
        elif command.is_launched:
            new.remark(
                "deepspeed and torchrun started a process on each GPU; here one is the default: add "
                "actor.num_gpus_per_node=<GPUs>"
            )
        if command.nodes is not None and command.nodes > 1:
            new.add("actor.num_nodes", str(command.nodes))
