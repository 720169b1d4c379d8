"""How a flag is declared: a dataclass field with type, default, help, bounds and condition. `walk` lists all flags.

A flag is of type bool, int, float, str, a list of these, a table `dict[str, Section]` of named entries, each with the
flags of a section, or a mapping `dict[str, Any]` whose names and values another program knows. `list[float] | None` may
be null.
"""

from __future__ import annotations

import ast
import dataclasses
import sys
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cache, partial
from itertools import pairwise
from pathlib import Path
from typing import Any

from rlhf_suite import registry
from rlhf_suite.config.declarations.flag_types import FlagType, field_types
from rlhf_suite.python_source import parse_file

SectionClass = type  # in `FlagInfo` this name means the type of a flag
# What a flag may do when a run is continued: change without a word, change with ds.use_universal_ckpt (it says where a
# run works, and in what portions), change when ckpt.allow_changes names it, or never.
SET = " is set"  # what `is_set` says
FREE, SHAPE, NAMED, FIXED = "free", "shape", "named", "fixed"


@dataclass(frozen=True)
class When:
    """The condition under which a flag is read: the value that another flag must have.

    `flag` is the other flag's whole key; one that begins with a dot is in the section of the declaration. `says` is the
    condition in words, behind that key; `remedy` is the value to write. One of `alternatives` may hold instead.
    """

    flag: str
    is_met: Callable[[Any], bool]
    says: str
    remedy: str
    alternatives: tuple[When, ...] = ()

    def __or__(self, other: When) -> When:
        return replace(self, alternatives=(*self.alternatives, other))

    def below(self, prefix: str) -> When:
        """Return the condition with whole keys, for a declaration in the section `prefix` ("" or "actor.")."""
        key = f"{prefix}{self.flag[1:]}" if self.flag.startswith(".") else self.flag
        return replace(
            self, flag=key, alternatives=tuple(alternative.below(prefix) for alternative in self.alternatives)
        )

    def among(self, keys: Container[str]) -> When | None:
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

    @property
    def text(self) -> str:
        """The condition in words."""
        return " or ".join(f"{alternative.flag}{alternative.says}" for alternative in (self, *self.alternatives))

    @property
    def fix(self) -> str:
        """What to write so that the flag is read."""
        return " or ".join(f"{alternative.flag}={alternative.remedy}" for alternative in (self, *self.alternatives))


def flat(values: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return nested values under dotted keys."""
    result: dict[str, Any] = {}
    for name, value in values.items():
        result |= flat(value, f"{prefix}{name}.") if isinstance(value, dict) else {f"{prefix}{name}": value}
    return result


def all_values(section: Any, prefix: str = "") -> dict[str, Any]:
    """Return the value of every flag of a section under its dotted key, in a table that of every flag of its entries.

    Lists are those of the section, not copies.
    """
    return {key: value for key, value, _ in with_values(section, prefix)}


def with_values(section: Any, prefix: str = "") -> Iterator[tuple[str, Any, Meta]]:
    """Yield every flag of a section and of the entries of its tables and mappings: key, value, and what its declaration
    says."""
    owner: SectionClass = type(section)
    for field in fields(section):
        value = getattr(section, field.name)
        if isinstance(value, dict):
            is_table = field_types(owner)[field.name].is_table
            for name, entry in value.items():
                key = f"{prefix}{field.name}.{name}"
                yield from with_values(entry, f"{key}.") if is_table else [(key, entry, field.metadata["meta"])]
        elif "meta" in field.metadata:
            yield f"{prefix}{field.name}", value, field.metadata["meta"]
        else:
            yield from with_values(value, f"{prefix}{field.name}.")


def values_of(flag: str, values: Mapping[str, Any]) -> list[Any]:
    """Return the value of a flag, and those of the same name in a table beside it: reward.sources.<name>.rule."""
    section, _, name = flag.rpartition(".")
    named = [key for key in values if key.startswith(f"{section}.sources.") and key.rpartition(".")[2] == name]
    return [values[key] for key in (flag, *named)]


def is_true(flag: str) -> When:
    return When(flag, bool, "=true", "true")


def is_false(flag: str) -> When:
    return When(flag, lambda value: not value, "=false", "false")


def is_set(flag: str, remedy: str) -> When:
    return When(flag, lambda value: value is not None, SET, remedy)


def is_null(flag: str) -> When:
    return When(flag, lambda value: value is None, " is null", "null")


def is_positive(flag: str, remedy: str = "<number > 0>") -> When:
    return When(flag, lambda value: value is not None and value > 0, " > 0", remedy)


def is_one_of(flag: str, *names: str) -> When:
    return one_that(flag, names, lambda value: value in names)


def one_that(flag: str, names: Sequence[str], is_met: Callable[[Any], bool]) -> When:
    """Return the condition that a flag has one of these values, or another one that `is_met` accepts."""
    *most, last = names
    listed = f"{', '.join(most)} or {last}" if most else last
    return When(flag, is_met, f" is {listed}" if most else f"={last}", listed)


def needs(flag: str, algorithms: registry.Kind, *needs: str) -> When:
    """Return the condition that the algorithm which a flag names needs one of several things."""
    names = [name for name in algorithms.names() if any(algorithms.needs(name, need) for need in needs)]
    return one_that(flag, names, lambda name: any(algorithms.needs(name, need) for need in needs))


def reads(flag: str, algorithms: registry.Kind, name: str) -> When:
    """Return the condition that the algorithm which a flag names reads the flag `name`."""
    names = algorithms.that_read(name)
    return one_that(flag, names, lambda chosen: chosen is not None and algorithms.reads(chosen, name))


def is_not(flag: str, name: str, remedy: str) -> When:
    return When(flag, lambda value: value != name, f" is not {name}", remedy)


@dataclass(frozen=True)
class Meta:
    """What a flag says about itself beyond its type: a sentence of help, allowed values, bounds, and the conditions
    under which it is read; `resume`: whether a continued run may have another value; `algorithms`: the flag names one
    of them, or a user's own; `strict`: why another value than the default is a mistake wherever it comes from, where
    the conditions do not hold."""

    help: str
    listed: tuple[str | int, ...] | None = None
    gt: float | None = None
    ge: float | None = None
    lt: float | None = None
    le: float | None = None
    resume: str = NAMED
    when: tuple[When, ...] = ()
    algorithms: registry.Kind | None = None
    strict: str = ""

    @property
    def choices(self) -> tuple[str | int, ...] | None:
        """The allowed values, or the names of the algorithms that the suite itself declares."""
        return self.algorithms.names() if self.algorithms is not None else self.listed


@dataclass(frozen=True)
class FlagInfo:
    """One flag of a task: its dotted key, type, default, `Meta`, and the dataclass that declares it.

    In `meta.when` are whole keys, and the conditions of the sections around the flag too.
    """

    key: str
    type: FlagType
    default: Any
    meta: Meta
    owner: SectionClass
    is_of_entry: bool = False  # of a table, where it is written as `name: value`

    @property
    def before_value(self) -> str:
        """What stands before a value of the flag where it is written."""
        return f"{self.key.rpartition('.')[2]}: " if self.is_of_entry else f"{self.key}="

    @property
    def meaning(self) -> str:
        """What the flag means: the text in its declaration, or the one below it."""
        name = self.key.rpartition(".")[2]
        return self.meta.help or next(texts[name] for base in self.owner.__mro__ if name in (texts := texts_in(base)))

    @property
    def help(self) -> str:
        """What the flag means, and when it is read."""
        conditions = " and ".join(condition.text for condition in self.meta.when)
        return f"{self.meaning}. Read when {conditions}" if conditions else self.meaning


@cache
def texts_in(section: SectionClass) -> dict[str, str]:
    """Return the texts below the flags that a class declares itself, read from its source."""
    module = parse_file(Path(sys.modules[section.__module__].__file__ or ""))
    body = next(node.body for node in module.body if isinstance(node, ast.ClassDef) and node.name == section.__name__)
    return {
        above.target.id: " ".join(text.value.value.split())
        for above, text in pairwise(body)
        if isinstance(above, ast.AnnAssign) and isinstance(above.target, ast.Name)
        and isinstance(text, ast.Expr) and isinstance(text.value, ast.Constant) and isinstance(text.value.value, str)
    }  # fmt: skip


def flag(  # noqa: PLR0913
    default: Any,
    help: str = "",
    *,
    choices: tuple[str | int, ...] | None = None,
    gt: float | None = None,
    ge: float | None = None,
    lt: float | None = None,
    le: float | None = None,
    resume: str = NAMED,
    when: When | tuple[When, ...] = (),
    algorithms: registry.Kind | None = None,
    strict: str = "",
    tasks: tuple[str, ...] = (),
    defaults: Mapping[str, Any] | None = None,
    never_null: tuple[str, ...] = (),
    of_tasks: Mapping[str, Mapping[str, Any]] | None = None,
) -> Any:
    """Declare a flag. A list or dict default is copied for each instance. `choices` and bounds hold for each item.

    `help` says what it means; a longer text stands below the declaration, as the documentation of an attribute does.

    A flag that names one of the `algorithms` of a kind takes a user's own too, as path.py:function. Which flags only
    some of them read is known from their declarations, and needs no `when`. A flag that is not read is a problem where
    the command line sets it. For a `strict` one it is a problem also where a preset or a file does, and the text says
    why it is not read.

    In a `Section`, only `tasks` have the flag (none named: every task that has the section), and `defaults` are those
    of tasks in which it has another one. In `never_null` it has a value always, though it may be null in others.
    `of_tasks` are other fields of `Meta` by task, such as bounds: {"ppo": {"ge": 0.01}}.
    """
    meta = Meta(help, choices, gt, ge, lt, le, resume, all_of(when), algorithms, strict)
    by_task = {"defaults": defaults or {}, "never_null": never_null, "of_tasks": of_tasks or {}}
    return with_default(default, {"meta": meta, "tasks": tasks, **by_task})


def with_default(default: Any, metadata: Mapping[str, Any]) -> Any:
    """Return the field of a flag with this default and what its declaration says."""
    if isinstance(default, list | dict):
        return dataclasses.field(default_factory=partial(type(default), default), metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


def group(
    cls: type,
    defaults: Mapping[str, Any] | None = None,
    when: When | tuple[When, ...] = (),
    strict: str = "",
    tasks: tuple[str, ...] = (),
    of_tasks: Mapping[str, Mapping[str, Any]] | None = None,
) -> Any:
    """Declare a section of flags: with other defaults than its class by dotted name within the section
    ({"adam.lr": 9e-6}), and with the condition under which all of it is read; `strict` and `tasks` as of each flag.

    `of_tasks` says by task what differs, with `values` for the defaults: {"sft": {"values": {"lr": 5e-6}}}."""
    metadata: dict[str, Any] = {"when": all_of(when), "strict": strict, "tasks": tasks, "of_tasks": of_tasks or {}}
    metadata |= {"section": cls, "values": defaults or {}}
    return dataclasses.field(default_factory=partial(with_defaults, cls, metadata["values"]), metadata=metadata)


def all_of(when: When | tuple[When, ...]) -> tuple[When, ...]:
    return (when,) if isinstance(when, When) else when


def with_defaults(cls: type, defaults: Mapping[str, Any]) -> Any:
    """Return a section with other values for the flags in `defaults`."""
    section = cls()
    for key, value in defaults.items():
        *parents, name = key.split(".")
        owner = section
        for parent in parents:
            owner = getattr(owner, parent)
        assert hasattr(owner, name), f"{cls.__name__} has no flag {key}"
        setattr(owner, name, value)
    return section


def walk(config: Any, prefix: str = "") -> Iterator[FlagInfo]:
    """Yield every flag below a section class or instance (an instance shows its task's own defaults).

    A condition is dropped in a task that does not have the flag it depends on, or where it holds always.
    """
    infos = list(walk_section(config() if isinstance(config, type) else config, prefix))
    keys = {info.key for info in infos}
    never_null = {info.key for info in infos if not info.type.optional}
    for info in infos:
        known = filter(None, (condition.among(keys) for condition in info.meta.when))
        when = tuple(one for one in known if one.says != SET or one.flag not in never_null)
        yield replace(info, meta=replace(info.meta, when=when))


def walk_section(
    instance: Any,
    prefix: str,
    around: tuple[When, ...] = (),
    by_algorithm: Mapping[str, When] | None = None,
    strict: str = "",
) -> Iterator[FlagInfo]:
    """Yield the flags of a section and of those in it.

    `around` are the conditions of the sections around it, which may be `strict`; `by_algorithm` are those of flags that
    only some algorithms read.
    """
    by_algorithm = {**(by_algorithm or {}), **read_by_some(instance, prefix)}
    owner: SectionClass = type(instance)
    types = field_types(owner)
    for field in fields(instance):
        value = getattr(instance, field.name)
        key = f"{prefix}{field.name}"
        if "meta" in field.metadata:
            meta: Meta = field.metadata["meta"]
            some = (by_algorithm[key],) if key in by_algorithm else ()
            when = (*around, *some, *(condition.below(prefix) for condition in meta.when))
            yield FlagInfo(key, types[field.name], value, replace(meta, when=when, strict=meta.strict or strict), owner)
        else:
            own = tuple(condition.below(prefix) for condition in all_of(field.metadata["when"]))
            inner = field.metadata["strict"] or strict
            yield from walk_section(value, f"{key}.", (*around, *own), by_algorithm, inner)


def read_by_some(instance: Any, prefix: str) -> dict[str, When]:
    """Return the conditions of flags that only some algorithms read of those that a flag of this section names."""
    named = [(field.name, field.metadata["meta"].algorithms) for field in fields(instance) if "meta" in field.metadata]
    return {
        f"{prefix}{algorithms.below}{name}": reads(f"{prefix}{flag_name}", algorithms, name)
        for flag_name, algorithms in named
        for name in (algorithms.flags() if algorithms is not None else ())
    }


def by_section(infos: Iterable[FlagInfo]) -> dict[str, list[FlagInfo]]:
    """Return flags under the key of their section ("" for the root's own), sections in order of appearance."""
    sections: dict[str, list[FlagInfo]] = {}
    for info in infos:
        sections.setdefault(info.key.rpartition(".")[0], []).append(info)
    return sections
