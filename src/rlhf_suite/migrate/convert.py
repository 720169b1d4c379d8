"""A command of OpenRLHF (0.8 to 0.11, flat or dotted flags) becomes a command line of this suite.

Most flags have one name here, which `config/check/names.py` knows. This file has the others: those whose value changes,
that become several flags, that need nothing here, or that have no counterpart. No flag is passed over in silence: each
ends as a word of the new command line, as a remark, or in the list of what is lost.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache

from rlhf_suite.config import name_program
from rlhf_suite.config.check.names import SECRETS, rename
from rlhf_suite.config.declarations.runs import flags_of
from rlhf_suite.migrate import fork
from rlhf_suite.migrate.combinations import COMBINATIONS
from rlhf_suite.migrate.command import Migrated, Old, Trace, join_values
from rlhf_suite.migrate.handlers import HANDLERS, NEEDS_VALUE
from rlhf_suite.migrate.script import ELLIPSIS, Command, join_words
from rlhf_suite.migrate.shell_text import in_shell, only_variables

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
FLAG = re.compile(r"--\w")
# Flags of OpenRLHF with several values, and without one, where the flags here do not tell.
LISTS = ("advantage_clip_low_high", "vllm_is_truncated_threshold")
SWITCHES = (
    "bf16", "fp16", "flash_attn", "use_icepop", "enable_vllm_is_correction", "vllm_enable_is_correction", "is_rm",
    "use_kl_estimator_k3", "greedy_sampling", "ref_reward_offload", "enable_csft", "use_cispo", "use_dual_policy_loss",
    "ipo", "vanilla_loss", "margin_loss", "compute_fp32_loss", "vllm_sync_with_ray", "actor_init_on_gpu", "use_ms",
)  # fmt: skip
SUPERVISED = ("sft", "rm", "dpo", "kto", "prm", "distill")


def migrate(command: Command) -> Migrated:
    """Convert a command of OpenRLHF."""
    given = Given.of(command.arguments)
    old = Old(command.entry, task_of(command.entry, given.flags), given.flags)
    new = Migrated(old.entry, old.task)
    new.lost += [*command.lost, *(f"{join_words([word])}: {reason}" for word, reason in given.strays)]
    for text in (*command.remarks, *given.remarks):
        new.remark(text)
    for name, values in old.flags.items():
        num_done, num_lost = len(new.done), len(new.lost)
        convert(new, old, name, values)
        new.traces.append(Trace(name, tuple(values), tuple(new.done[num_done:]), tuple(new.lost[num_lost:])))
    add_ranks(new, command)
    for name, value in command.environment.items():
        fork.environment(new, old, name, value)
    for rule in COMBINATIONS:
        rule(new, old)
    new.leave_out_foreign()
    return new


@dataclass
class Given:
    """The arguments of a command by flag: each with its values, none for a switch."""

    flags: dict[str, list[str]] = field(default_factory=dict)
    strays: list[tuple[str, str]] = field(default_factory=list)  # words that belong to no flag, and why
    remarks: list[str] = field(default_factory=list)

    @classmethod
    def of(cls, arguments: Sequence[str]) -> Given:
        """Sort the arguments of a command."""
        given, name = cls(), ""
        for word in arguments:
            if ELLIPSIS.fullmatch(word):
                given.remarks.append(f"{word}: a fragment; the flags that it stands for are not here")
            elif FLAG.match(word):
                name = given.add(word)
            elif only_variables(word) and name and not takes_another(name, given.flags[name]):
                given.strays.append((word, "the script does not set it; write the flags that it stands for"))
            elif not name:
                given.strays.append((word, "no flag is before it"))
            else:
                given.flags[name].append(word)
        return given

    def add(self, word: str) -> str:
        """Note a flag; return its name. Of a flag that is given twice, OpenRLHF takes the last."""
        given, equals, value = word.lstrip("-").partition("=")
        name = given.replace("-", "_")
        if name in self.flags:
            self.remarks.append(
                f"--{join_words([name, *self.flags[name]])} is given again later, and the last one counts"
            )
        self.flags[name] = [value] if equals else []
        return name


def takes_another(name: str, values: Sequence[str]) -> bool:
    """Return whether a flag takes one more value: a list takes any number, a switch none, others one."""
    if name in LISTS or is_list(name):
        return True
    return not values and name not in SWITCHES and not is_switch(name)


@cache
def bases(name: str) -> frozenset[type]:
    """Return the types of the flags that a name stands for, in all tasks."""
    types = set()
    for task in TASKS.values():
        known = flags_of(task)
        key = name if name in known else rename(name, known)
        types |= {known[key].type.base} if key is not None else set()
    return frozenset(types)


def is_list(name: str) -> bool:
    return list in bases(name)


def is_switch(name: str) -> bool:
    return bases(name) == {bool}


def task_of(entry: str, flags: Mapping[str, Sequence[str]]) -> str:
    """Return the task that does what an entry point does."""
    if entry == "batch_inference":
        return "score" if "rm" in flags.get("eval_task", ()) else "generate"
    return TASKS[entry]


def convert(new: Migrated, old: Old, name: str, values: Sequence[str]) -> None:
    """Convert one flag, and see to it that each of its values is somewhere."""
    num_done, num_lost = len(new.done), len(new.lost)
    kept = values if name in LISTS or is_list(name) else values[:1]
    write(new, old, name, kept)
    for word in values[len(kept) :]:
        new.lost.append(f"{join_words([word])}: stands after --{name}, which takes one value")
    done, lost = new.done[num_done:], new.lost[num_lost:]
    if name in SECRETS or ((done or lost) and are_in(kept, [*done, *lost])):
        return
    said = [text for text in done if text in new.remarks]
    new.remarks = [text for text in new.remarks if text not in said]
    new.remark(f"--{join_words([name, *kept])}: {'; '.join(done) or f'task={old.task} needs nothing for it'}")


def are_in(values: Sequence[str], texts: Sequence[str]) -> bool:
    """Return whether texts say each of some values."""
    together = "\n".join(texts).replace("\\n", "\n")
    return all(value and value.replace("\\n", "\n") in together for value in values)


def write(new: Migrated, old: Old, name: str, values: Sequence[str]) -> None:
    """Write the flag, or the remark, that an old flag becomes."""
    known = flags_of(old.task)
    handler = HANDLERS.get(name) or fork.HANDLERS.get(name)
    if handler is not None and (values or name not in NEEDS_VALUE):
        handler(new, old, values)
        return
    key = name if name in known else rename(name, known)
    if key is not None and handler is None:
        if values or known[key].type.base is bool:
            new.add(key, join_values(values, key, old.task))
        else:
            new.lost.append(f"--{name}: has no value; write {key}=<value>")
    elif handler is not None:
        new.lost.append(f"--{name}: has no value")
    elif any(name in flags_of(task) or rename(name, flags_of(task)) for task in TASKS.values()):
        new.lost.append(f"--{join_words([name, *values])}: task={old.task} has no such flag")
    else:
        new.lost.append(f"--{join_words([name, *values])}: no counterpart is known")


def command_line(new: Migrated, width: int = 100) -> str:
    """Return the command as a shell reads it, a few flags on a line. A `$variable` that is not set stays one."""
    lines, line = [], f"{name_program()} task={new.task}"
    for word in new.words[1:]:
        text = in_shell(word)
        if len(line) + len(text) > width:
            lines.append(line)
            line = "   "
        line += f" {text}"
    return " \\\n".join([*lines, line])


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
