"""How a flag is declared: a dataclass field with type, default, help, bounds and condition. `walk` lists all flags.

A flag is of type bool, int, float, str, a list of these, a table `dict[str, Section]` of named entries, each with the
flags of a section, or a mapping `dict[str, Any]` whose names and values another program knows. `list[float] | None` may
be null.
"""

from __future__ import annotations

import ast
import dataclasses
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, fields, replace
from functools import cache, partial
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeVar

from rlhf_suite import registry
from rlhf_suite.config.declarations.calls import is_constant
from rlhf_suite.config.declarations.conditions import SET, Condition, Need, algorithm_reads
from rlhf_suite.config.declarations.flag_types import FlagType, field_types
from rlhf_suite.python_source import parse_file

SectionClass = type  # in `FlagInfo` this name means the type of a flag
Declared = TypeVar("Declared", Condition, Need)
# What a flag may do when a run is continued: change without a word, change with ds.use_universal_ckpt (it says where a
# run works, and in what portions), change when ckpt.allow_changes names it, or never.
FREE, SHAPE, NAMED, FIXED = "free", "shape", "named", "fixed"


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


@dataclass(frozen=True)
class Meta:
    """What a flag says about itself beyond its type: a sentence of help, allowed values, bounds, the conditions under
    which it is read, and what must hold with it; `resume`: whether a continued run may have another value;
    `algorithms`: the flag names one of them, or a user's own."""

    help: str
    listed: tuple[str | int, ...] | None = None
    gt: float | None = None
    ge: float | None = None
    lt: float | None = None
    le: float | None = None
    resume: str = NAMED
    when: tuple[Condition, ...] = ()
    algorithms: registry.Kind | None = None
    needs: tuple[Need, ...] = ()

    @property
    def choices(self) -> tuple[str | int, ...] | None:
        """The allowed values, or the names of the algorithms that the suite itself declares."""
        return self.algorithms.names() if self.algorithms is not None else self.listed


@dataclass(frozen=True)
class FlagInfo:
    """One flag of a task: its dotted key, type, default, `Meta`, and the dataclass that declares it.

    In `meta.when` and `meta.needs` are whole keys, and what the sections around the flag declare too.
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
        """What the flag means, when it is read, and what it needs."""
        read = f"read when {self.read_when}" if self.read_when else ""
        return ". ".join([self.meaning, *(f"{text[0].upper()}{text[1:]}" for text in (read, self.needed) if text)])

    @property
    def read_when(self) -> str:
        """The conditions under which it is read, in words."""
        return " and ".join(condition.text for condition in self.meta.when)

    @property
    def needed(self) -> str:
        """What must hold with it, in words, but for what `read_when` says already."""
        demands: dict[str, list[str]] = {}
        for need in self.meta.needs:
            if need.condition not in self.meta.when:
                name = self.key.rpartition(".")[2]
                value = f"with {name}{need.at.demand} it " if need.at is not None else ""
                demands.setdefault(value, []).append(need.condition.demand)
        return "; ".join(f"{value}needs {', '.join(texts)}" for value, texts in demands.items())


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
    when: Condition | tuple[Condition, ...] = (),
    needs: Need | tuple[Need, ...] = (),
    algorithms: registry.Kind | None = None,
    tasks: tuple[str, ...] = (),
    defaults: Mapping[str, Any] | None = None,
    never_null: tuple[str, ...] = (),
    of_tasks: Mapping[str, Mapping[str, Any]] | None = None,
) -> Any:
    """Declare a flag. A list or dict default is copied for each instance. `choices` and bounds hold for each item.

    `help` says what it means; a longer text stands below the declaration, as the documentation of an attribute does.

    A flag that names one of the `algorithms` of a kind takes a user's own too, as path.py:function. Which flags only
    some of them read is known from their declarations, and needs no `when`. `conditions.py` says what `when` and
    `needs` are. A flag that is not read, and is set, is a problem also where a preset or a file sets it, if the
    condition is one of its `needs` too.

    In a `Section`, only `tasks` have the flag (none named: every task that has the section), and `defaults` are those
    of tasks in which it has another one. In `never_null` it has a value always, though it may be null in others.
    `of_tasks` are other fields of `Meta` by task, such as bounds: {"ppo": {"ge": 0.01}}.
    """
    meta = Meta(help, choices, gt, ge, lt, le, resume, all_of(when), algorithms, all_of(needs))
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
    when: Condition | tuple[Condition, ...] = (),
    needs: Need | tuple[Need, ...] = (),
    tasks: tuple[str, ...] = (),
    of_tasks: Mapping[str, Mapping[str, Any]] | None = None,
) -> Any:
    """Declare a section of flags: with other defaults than its class by dotted name within the section
    ({"adam.lr": 9e-6}), and with the condition under which all of it is read; `needs` and `tasks` as of each flag.

    `of_tasks` says by task what differs, with `values` for the defaults: {"sft": {"values": {"lr": 5e-6}}}."""
    metadata: dict[str, Any] = {"when": all_of(when), "needs": all_of(needs), "tasks": tasks}
    metadata |= {"of_tasks": of_tasks or {}, "section": cls, "values": defaults or {}}
    return dataclasses.field(default_factory=partial(with_defaults, cls, metadata["values"]), metadata=metadata)


def all_of(given: Declared | tuple[Declared, ...]) -> tuple[Declared, ...]:
    return given if isinstance(given, tuple) else (given,)


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

    What is a constant of a task is not one of its flags. A condition or a need is dropped in a task that does not have
    the flag it depends on, or where it holds always.
    """
    instance = config() if isinstance(config, type) else config
    task = getattr(instance, "TASK", "")
    infos = [info for info in walk_section(instance, prefix) if not is_constant(task, info.key)]
    keys = {info.key for info in infos}
    never_null = {info.key for info in infos if not info.type.optional}

    def may_fail(condition: Condition) -> bool:
        return condition.says != SET or condition.flag not in never_null

    for info in infos:
        when = filter(None, (condition.among(keys) for condition in info.meta.when))
        needs = filter(None, (need.among(keys) for need in info.meta.needs))
        meta = replace(info.meta, when=tuple(filter(may_fail, when)))
        yield replace(info, meta=replace(meta, needs=tuple(need for need in needs if may_fail(need.condition))))


def walk_section(
    instance: Any,
    prefix: str,
    around: tuple[Condition, ...] = (),
    by_algorithm: Mapping[str, Condition] | None = None,
    needs_around: tuple[Need, ...] = (),
) -> Iterator[FlagInfo]:
    """Yield the flags of a section and of those in it.

    `around` and `needs_around` are the conditions and the needs of the sections around it; `by_algorithm` are the
    conditions of flags that only some algorithms read.
    """
    by_algorithm = {**(by_algorithm or {}), **read_by_some(instance, prefix)}
    owner: SectionClass = type(instance)
    types = field_types(owner)
    for field in fields(instance):
        value = getattr(instance, field.name)
        key = f"{prefix}{field.name}"
        declared = field.metadata.get("meta") or SimpleNamespace(**field.metadata)
        when = tuple(condition.below(prefix) for condition in all_of(declared.when))
        needs = (*needs_around, *(need.below(prefix) for need in all_of(declared.needs)))
        if isinstance(declared, Meta):
            some = (by_algorithm[key],) if key in by_algorithm else ()
            meta = replace(declared, when=(*around, *some, *when), needs=needs)
            yield FlagInfo(key, types[field.name], value, meta, owner)
        else:
            yield from walk_section(value, f"{key}.", (*around, *when), by_algorithm, needs)


def read_by_some(instance: Any, prefix: str) -> dict[str, Condition]:
    """Return the conditions of flags that only some algorithms read of those that a flag of this section names."""
    named = [(field.name, field.metadata["meta"].algorithms) for field in fields(instance) if "meta" in field.metadata]
    return {
        f"{prefix}{algorithms.below}{name}": algorithm_reads(f"{prefix}{flag_name}", algorithms, name)
        for flag_name, algorithms in named
        for name in (algorithms.flags() if algorithms is not None else ())
    }


def by_section(infos: Iterable[FlagInfo]) -> dict[str, list[FlagInfo]]:
    """Return flags under the key of their section ("" for the root's own), sections in order of appearance."""
    sections: dict[str, list[FlagInfo]] = {}
    for info in infos:
        sections.setdefault(info.key.rpartition(".")[0], []).append(info)
    return sections
