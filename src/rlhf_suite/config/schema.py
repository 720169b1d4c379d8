"""The JSON schema of a configuration, by which editors check and complete YAML files of flags: `rlhf-suite schema`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from rlhf_suite.config.declarations.flags import FlagInfo, walk
from rlhf_suite.config.declarations.runs import TASKS, Run

JSON_TYPES = {bool: "boolean", int: "integer", float: "number", str: "string"}
LIMITS = {"gt": "exclusiveMinimum", "ge": "minimum", "lt": "exclusiveMaximum", "le": "maximum"}
OWN = r"^[^:]+:\w+$"  # <file.py>:<function>
INTERPOLATION = {"type": "string", "pattern": r"^\$\{"}


def schema() -> dict[str, Any]:
    """Return the JSON schema of a whole configuration; `$defs` has one for each task."""
    tasks = {task: {**nest(walk(Run.of(task))), "description": info.help} for task, info in TASKS.items()}
    for task in tasks.values():
        task["properties"] |= {"defaults": {"type": "array"}, "hydra": {"type": "object"}}
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "rlhf_suite",
        "anyOf": [{"$ref": f"#/$defs/{task}"} for task in tasks],
        "$defs": tasks,
    }


def nest(infos: Iterable[FlagInfo]) -> dict[str, Any]:
    """Return flags as nested objects, in which no other keys are allowed."""
    root: dict[str, Any] = {"type": "object", "additionalProperties": False, "properties": {}}
    for info in infos:
        *sections, name = info.key.split(".")
        node = root
        for section in sections:
            empty = {"type": "object", "additionalProperties": False, "properties": {}}
            node = node["properties"].setdefault(section, empty)
        node["properties"][name] = {"description": info.help, "default": info.default, "anyOf": [*forms(info)]}
    return root


def forms(info: FlagInfo) -> Iterator[dict[str, Any]]:
    """Yield the forms of a value: the value itself, an interpolation, and null where it is allowed."""
    expected = info.type
    if expected.base is dict and not expected.is_table:
        yield {"type": "object"}
        return
    if expected.is_table:
        yield {"type": "object", "additionalProperties": nest(walk(expected.section))}
        return
    scalar: dict[str, Any] = {"type": JSON_TYPES[expected.scalar]}
    if info.meta.algorithms is not None:
        scalar = {"anyOf": [{"enum": list(info.meta.algorithms.names())}, {"type": "string", "pattern": OWN}]}
    elif info.meta.choices is not None:
        scalar = {"enum": list(info.meta.choices)}
    scalar |= {LIMITS[name]: getattr(info.meta, name) for name in LIMITS if getattr(info.meta, name) is not None}
    yield {"type": "array", "items": scalar} if expected.item is not None else scalar
    yield INTERPOLATION
    if expected.optional:
        yield {"type": "null"}
