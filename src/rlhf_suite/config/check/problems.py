"""A mistake in the configuration: which flag, what is wrong, how to correct it; and the rules that find mistakes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, TypeVar

from rlhf_suite.config.check.formatting import number_of
from rlhf_suite.errors import UserError

# What a mistake is about: the name of a flag or preset, its old name, one value, several flags together, or the world
# (files, servers, this machine).
ProblemKind = Literal["name", "renamed", "value", "rule", "inspection"]


@dataclass(frozen=True)
class Problem:
    """One mistake. `key` is the flag (or the word of the command line), `fix` says what to write instead.

    `kind` says what the mistake is about, and `meant` has the other flags that were probably meant. Two problems that
    read alike are equal, whoever found them.
    """

    key: str
    what: str
    fix: str
    meant: tuple[str, ...] = field(default=(), compare=False)
    kind: ProblemKind = field(default="value", compare=False)

    def of_kind(self, kind: ProblemKind) -> Problem:
        """Return the same problem as one of another kind."""
        return replace(self, kind=kind)

    def __str__(self) -> str:
        return f"  {self.key}: {self.what}\n      fix: {self.fix}"


def report(problems: Sequence[Problem]) -> str:
    """Return all problems as one text for the console."""
    return "\n".join([f"{number_of(len(problems), 'problem')} in the configuration:", *map(str, problems)])


class ConfigurationError(UserError):
    """Mistakes in a configuration. The text of the error is the message that the console shows."""

    def __init__(self, problems: Sequence[Problem]) -> None:
        super().__init__(report(problems))
        self.problems = [*problems]

    @classmethod
    def of(cls, key: str, problem: str, fix: str) -> ConfigurationError:
        """Return the error for a single mistake."""
        return cls([Problem(key, problem, fix)])

    def __reduce__(self) -> tuple[type[ConfigurationError], tuple[list[Problem]]]:
        return type(self), (self.problems,)


def distinct(problems: Iterable[Problem]) -> list[Problem]:
    """Return problems without repetitions, in the order of their first appearance."""
    return list(dict.fromkeys(problems))


Function = TypeVar("Function", bound=Callable[..., Iterable[Problem]])
# Every rule between flags, by declaration, with the tasks that it is for. `rules/check_run.py` runs those of a run.
RULES: dict[Callable[..., Iterable[Problem]], tuple[str, ...]] = {}


def rule(tasks: tuple[str, ...] = ()) -> Callable[[Function], Function]:
    """Declare a rule between flags, for the runs of these tasks; none named: for every run."""

    def declare(function: Function) -> Function:
        RULES[function] = tasks
        return function

    return declare
