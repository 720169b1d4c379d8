"""Sections of flags that differ between tasks: one class, of which a run has the flags and defaults of its task.

`EvalConfig` declares every flag of `eval.`, with the tasks that have it. `EvalConfig.of("sft")` has the flags of
task=sft and no others: to read or set another one is an AttributeError, so that code cannot take the default of a flag
that nobody can set.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from copy import copy
from dataclasses import dataclass, fields
from functools import cache, partial
from types import MappingProxyType, NoneType
from typing import Any, ClassVar, NoReturn, Self, get_args, get_type_hints

from rlhf_suite.config.declarations.flags import with_default, with_defaults


class SectionClass(type):
    """The class of the classes that differ between tasks, by which pickle finds those of a task."""

    def __getattr__(cls, name: str) -> type[Any]:
        """Return the class of a task: `EvalConfig.of_sft`, which another process may have to make."""
        if not name.startswith(OF):
            raise AttributeError(f"{cls.__name__} has no attribute {name!r}")
        return class_of(cls, name.removeprefix(OF))


OF = "of_"


class Section(metaclass=SectionClass):
    """A class of flags that differ between tasks; its instances are those of one task.

    A class is one if it has a flag with `tasks=` or `defaults=`, or a group of a class that is one. `tasks=` of the
    class are those of each flag in it that names none.
    """

    TASK: ClassVar[str] = ""
    __dataclass_fields__: ClassVar[dict[str, dataclasses.Field[Any]]]

    def __init_subclass__(cls, tasks: tuple[str, ...] = ()) -> None:
        for field in vars(cls).values() if tasks else ():
            if isinstance(field, dataclasses.Field) and not field.metadata["tasks"]:
                field.metadata = MappingProxyType({**field.metadata, "tasks": tasks})

    def __new__(cls, *_: object, **__: object) -> Self:
        if not cls.TASK:
            raise TypeError(f"{cls.__name__} differs between tasks: make it with {cls.__name__}.of(<task>)")
        return super().__new__(cls)

    def has(self, name: str) -> bool:
        """Return whether the section's task has a flag, or a group of flags, that other tasks have."""
        assert name in self.__dataclass_fields__, f"no task has {name!r} in {type(self).__name__}"
        return any(field.name == name for field in fields(self))

    def as_of(self, task: str, **changes: Any) -> Self:
        """Return the section of another task with the values of the flags that both have, and `changes`."""
        declared: type = next(base for base in type(self).__mro__ if not base.__dict__.get("TASK"))
        cls = class_of(declared, task)
        shared = {field.name: getattr(self, field.name) for field in fields(cls) if self.has(field.name)}
        section: Self = cls(**shared | changes)
        return section

    @classmethod
    def of(cls, task: str, **values: Any) -> Self:
        """Return the section of a task, with these values and the task's defaults of all other flags."""
        declared: type = cls
        section: Self = class_of(declared, task)(**values)
        return section


def section_of(declared: type, task: str, values: Mapping[str, Any]) -> Any:
    """Return the section of a task with other defaults. Its class is made with the first run of the task, so that the
    start of a run does not make those of all tasks."""
    return with_defaults(class_of(declared, task) if issubclass(declared, Section) else declared, values)


@cache
def class_of(declared: type, task: str) -> type[Any]:
    """Return the class of a task's sections, which has the name of the one that declares the flags of all tasks."""
    names = {"__module__": declared.__module__, "__qualname__": f"{declared.__qualname__}.{OF}{task}"}
    cls = type(declared)(declared.__name__, (declared,), {"TASK": task, "__doc__": declared.__doc__, **names})
    adapt(cls, task)
    return dataclass(cls)


def adapt(cls: type, task: str) -> None:
    """Give a class that is about to become a dataclass its fields, and those of its base, as a task has them."""
    assert cls.__base__ is not None
    hints = get_type_hints(cls.__base__) | cls.__annotations__
    inherited = {field.name: field for field in fields(cls.__base__)}
    own = {name: field for name, field in vars(cls).items() if isinstance(field, dataclasses.Field)}
    for name, field in (inherited | own).items():
        of_task = field_of(name, field, task, cls.__name__)
        if of_task is not field:
            # A class variable is not a field, and it hides the field of this name in the base.
            cls.__annotations__[name] = hint_of(of_task, hints[name])
            if task in field.metadata.get("never_null", ()):
                (cls.__annotations__[name],) = (hint for hint in get_args(hints[name]) if hint is not NoneType)
            setattr(cls, name, of_task)


def hint_of(of_task: dataclasses.Field[Any] | Absent, hint: Any) -> Any:
    """Return the type of a field as a task has it, of which `hint` is the type in the class of all tasks."""
    if isinstance(of_task, Absent):
        return ClassVar[Any]
    return of_task.metadata.get("section", hint)


class Absent:
    """Stands in the class of a task for a flag that the task does not have."""

    def __init__(self, problem: str) -> None:
        self.problem = problem

    def __get__(self, section: object, owner: type | None = None) -> NoReturn:
        raise AttributeError(self.problem)

    def __set__(self, section: object, value: object) -> NoReturn:
        raise AttributeError(self.problem)


def field_of(name: str, field: dataclasses.Field[Any], task: str, owner: str) -> dataclasses.Field[Any] | Absent:
    """Return a field as a task has it: the same one where nothing differs."""
    declared: Mapping[str, Any] = field.metadata
    of_task: dataclasses.Field[Any] = field
    if declared["tasks"] and task not in declared["tasks"]:
        return Absent(f"task={task} has no {'section' if 'section' in declared else 'flag'} {name!r} in {owner}")
    changes = declared["of_tasks"].get(task, {})
    if "section" in declared:
        declared = {**declared, **changes}
        if changes or issubclass(declared["section"], Section):
            make = partial(section_of, declared["section"], task, declared["values"])
            of_task = dataclasses.field(default_factory=make, metadata=declared)
        return of_task
    if changes:
        declared = {**declared, "meta": dataclasses.replace(declared["meta"], **changes)}
        of_task = copy(field)
        of_task.metadata = MappingProxyType(declared)
    if task in declared["defaults"]:
        of_task = with_default(declared["defaults"][task], declared)
    elif task in declared["never_null"]:
        of_task = copy(of_task)  # of which the type differs
    return of_task
