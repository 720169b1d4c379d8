"""The four kinds of condition, and the first two of them, which are declared beside a flag.

1. `when` says whether a flag is read at all. On the command line, one that is not read is a mistake.
2. `needs` says what must hold together with a flag that is set, or that has certain values, and why. Where it does not
   hold, the run is refused, wherever the values come from.
3. A rule (`@rule` in `rules/`) is arithmetic, or a relation between several flags that is not one need.
4. An inspection (`preflight/inspections/`) looks at files, servers and the machine.

Bounds and choices belong to the type of a value, and are not conditions. Help, docs/flags.md, problems and remedies are
made of the first two kinds. Where the other flag names an algorithm, its declaration in `registry.py` is the condition.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from rlhf_suite import registry
from rlhf_suite.config.declarations.flag_types import spell

SET = " is set"  # what `is_set` says
OFF = (None, False, -1)  # values of a flag that is off by itself, 0 too


@dataclass(frozen=True)
class Condition:
    """What the value of a flag must be.

    `flag` is its whole key; one that begins with a dot is in the section of the declaration, and an empty one is the
    declared flag itself. `says` is the condition in words, after that key; `asks` the same after "needs" and the key,
    where that differs; `remedy` is the value to write, empty where the other flag is not to be changed. One of
    `alternatives` may hold instead.
    """

    flag: str
    is_met: Callable[[Any], bool] = field(compare=False)
    says: str
    remedy: str
    asks: str = ""
    alternatives: tuple[Condition, ...] = ()

    def __or__(self, other: Condition) -> Condition:
        return replace(self, alternatives=(*self.alternatives, other))

    def below(self, prefix: str) -> Condition:
        """Return the condition with whole keys, for a declaration in the section `prefix` ("" or "actor.")."""
        key = f"{prefix}{self.flag[1:]}" if self.flag.startswith(".") else self.flag
        return replace(
            self, flag=key, alternatives=tuple(alternative.below(prefix) for alternative in self.alternatives)
        )

    def among(self, keys: Container[str]) -> Condition | None:
        """Return the condition in a task with these flags; None where it has nothing to depend on."""
        if self.flag not in keys:
            return None
        return replace(
            self, alternatives=tuple(alternative for alternative in self.alternatives if alternative.flag in keys)
        )

    def holds(self, values: Mapping[str, Any]) -> bool:
        """Return whether the condition is met by the values of all flags of a run."""
        met = any(map(self.is_met, values_of(self.flag, values)))
        return met or any(alternative.holds(values) for alternative in self.alternatives)

    def may_hold(self, values: Mapping[str, Any]) -> bool:
        """Return whether the condition is met, or cannot be judged because a value has a wrong type."""
        try:
            return self.holds(values)
        except (TypeError, ValueError, AttributeError):
            return True

    @property
    def choices(self) -> tuple[Condition, ...]:
        """The condition and those that may hold instead."""
        return (self, *self.alternatives)

    @property
    def text(self) -> str:
        """The condition in words."""
        return " or ".join(f"{choice.flag}{choice.says}" for choice in self.choices)

    @property
    def demand(self) -> str:
        """The condition in words, after "needs"."""
        return " or ".join(f"{choice.flag}{choice.asks or choice.says}" for choice in self.choices)

    @property
    def fix(self) -> str:
        """What to write so that it holds; empty where nothing is to be written."""
        return " or ".join(f"{choice.flag}={choice.remedy}" for choice in self.choices if choice.remedy)


@dataclass(frozen=True)
class Need:
    """What must hold together with a flag.

    `why` is the reason, a clause. It must hold for the values `at` of the flag, a condition without a key; where none
    is given, for each value but the default, null and false. `off` is the value to write in place of such a one,
    where that is not the default. `fix` is the whole remedy, where these are not enough.
    """

    condition: Condition
    why: str
    at: Condition | None = None
    off: str = ""
    fix: str = ""

    def below(self, prefix: str) -> Need:
        """Return the need with whole keys, for a declaration in the section `prefix`."""
        return replace(self, condition=self.condition.below(prefix))

    def among(self, keys: Container[str]) -> Need | None:
        """Return the need in a task with these flags; None where it has nothing to depend on."""
        condition = self.condition.among(keys)
        return None if condition is None else replace(self, condition=condition)

    def concerns(self, value: Any, default: Any) -> bool:
        """Return whether it must hold for a value of the flag with this default."""
        return self.at.is_met(value) if self.at is not None else value not in (None, default) and value is not False


def values_of(flag: str, values: Mapping[str, Any]) -> list[Any]:
    """Return the value of a flag, and those of the same name in a table beside it: reward.sources.<name>.rule. Flags of
    reward.rule are those of eval.rule too, which judges held-out answers of a loop."""
    section, _, name = flag.rpartition(".")
    table = f"{section}.sources."  # made once: this runs for each need of a run, over all of its flags
    named = [key for key in values if key.startswith(table) and key.rpartition(".")[2] == name]
    if flag == "reward.rule" and "eval.rule" in values:
        named.append("eval.rule")
    return [values[key] for key in (flag, *named)]


def is_true(flag: str) -> Condition:
    return Condition(flag, bool, "=true", "true")


def is_false(flag: str) -> Condition:
    return Condition(flag, lambda value: not value, "=false", "false")


def is_set(flag: str, remedy: str) -> Condition:
    return Condition(flag, lambda value: value is not None, SET, remedy, " to be set")


def is_null(flag: str, remedy: str = "null") -> Condition:
    return Condition(flag, lambda value: value is None, " is null", remedy, "=null")


def is_above(flag: str, bound: float, remedy: str) -> Condition:
    return Condition(flag, lambda value: value is not None and value > bound, f" > {bound}", remedy)


def is_positive(flag: str, remedy: str = "<number > 0>") -> Condition:
    return is_above(flag, 0, remedy)


def is_one_of(flag: str, *values: Any, remedy: str | None = None) -> Condition:
    condition = one_that(flag, [*map(spell, values)], lambda value: value in values)
    return condition if remedy is None else replace(condition, remedy=remedy)


def one_that(flag: str, names: Sequence[str], is_met: Callable[[Any], bool]) -> Condition:
    """Return the condition that a flag has one of these values, or another one that `is_met` accepts."""
    *most, last = names
    listed = f"{', '.join(most)} or {last}" if most else last
    return Condition(flag, is_met, f" is {listed}" if most else f"={last}", listed, f"={listed}")


def is_not(flag: str, name: str, remedy: str) -> Condition:
    return Condition(flag, lambda value: value != name, f" is not {name}", remedy, f" other than {name}")


def algorithm_needs(flag: str, algorithms: registry.Kind, *needs: str) -> Condition:
    """Return the condition that the algorithm which a flag names needs one of several things."""
    names = [name for name in algorithms.names() if any(algorithms.needs(name, need) for need in needs)]
    return one_that(flag, names, lambda name: any(algorithms.needs(name, need) for need in needs))


def algorithm_reads(flag: str, algorithms: registry.Kind, name: str) -> Condition:
    """Return the condition that the algorithm which a flag names reads the flag `name`."""
    names = algorithms.that_read(name)
    return one_that(flag, names, lambda chosen: chosen is not None and algorithms.reads(chosen, name))


# Kernels for GPUs alone. Nobody gets a GPU by writing a flag.
ON_GPUS = is_one_of("launch.device", "auto", "cuda", remedy="")
BY_REWARD_MODEL = is_set("reward.model_name_or_path", "<reward model>")  # as in some runs of task=score
BY_TEXT = (
    is_set("reward.rule", "<name>")
    | is_set("reward.remote_url", "<.py file or URLs>")
    | is_set("reward.rubric", "<rubric.md>")
)
