"""What a conversion reads and writes: a command of OpenRLHF by its flags, and a command line of this suite."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from rlhf_suite.config.check.formatting import quote
from rlhf_suite.config.declarations.runs import flags_of
from rlhf_suite.migrate.shell_text import FOREIGN, readable


@dataclass(frozen=True)
class Trace:
    """What became of one flag of the old command: what was written or said for it, and what was lost."""

    name: str
    values: tuple[str, ...]
    done: tuple[str, ...]
    lost: tuple[str, ...]


@dataclass
class Migrated:
    """A command line of this suite, what differs in it, and what could not be converted."""

    entry: str
    task: str
    flags: dict[str, str] = field(default_factory=dict)  # key: value as it is written on the command line
    remarks: list[str] = field(default_factory=list)
    lost: list[str] = field(default_factory=list)
    done: list[str] = field(default_factory=list)  # all that was written and said, also what was before
    traces: list[Trace] = field(default_factory=list)  # of each old flag, in the order of the command

    @property
    def words(self) -> list[str]:
        """The words after `run.py`."""
        return [f"task={self.task}", *(f"{key}={value}" for key, value in self.flags.items())]

    def add(self, flag: str, value: str) -> None:
        """Write a flag, whatever its type: a text that Hydra would read otherwise is quoted."""
        self.put(flag, write_value(flag, value, self.task))

    def put(self, flag: str, value: str) -> None:
        """Write a flag whose value is one of Hydra's grammar already. Of two old flags for one, the last counts."""
        if (before := self.flags.get(flag, value)) != value:
            self.remark(f"{flag}={before}, of another flag of the command, is replaced by {value}")
        self.flags[flag] = value
        self.done.append(f"{flag}={value}")

    def leave_out(self, keys: Sequence[str], reason: str) -> None:
        """Take flags away, and say why."""
        for key in [key for key in keys if key in self.flags]:
            self.remark(f"{key}={readable(self.flags.pop(key))} is left out: {reason}")

    def leave_out_foreign(self) -> None:
        """Take flags away whose value only the old script could compute."""
        for key in [key for key, value in self.flags.items() if FOREIGN in value]:
            value = readable(self.flags.pop(key))
            self.lost.append(f"{key}={value}: only the old script computes it; write {key}=<value>")

    def remark(self, text: str) -> None:
        """Add a remark, once."""
        self.done.append(text)
        if text not in self.remarks:
            self.remarks.append(text)


@dataclass(frozen=True)
class Old:
    """A command of OpenRLHF with its flags by name: each with its values, none for a switch."""

    entry: str
    task: str
    flags: Mapping[str, Sequence[str]]

    def has(self, *names: str) -> bool:
        """Whether one of these flags is given."""
        return any(name in self.flags for name in names)

    def value(self, *names: str) -> str | None:
        """The first value of the first of these flags that is given."""
        return next((self.flags[name][0] for name in names if self.flags.get(name)), None)


Handler = Callable[[Migrated, Old, Sequence[str]], None]


def join_values(values: Sequence[str], key: str, task: str) -> str:
    """Return the values of a flag as one: a list where the flag is one, `true` for a switch."""
    if not values:
        return "true"
    if flags_of(task)[key].type.base is list:
        return f"[{','.join(values)}]"
    return " ".join(values)


def write_value(key: str, value: str, task: str) -> str:
    """Return a value as Hydra's grammar reads it back unchanged."""
    info = flags_of(task).get(key)
    if info is None or info.type.base is not str or value == "null":
        return value
    is_plain = value and all((sign.isascii() and sign.isalnum()) or sign in "._-/:@%+" for sign in value)
    return value if is_plain else quote(value)
