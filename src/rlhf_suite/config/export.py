"""The reference that is generated from the flags: docs/flags.md, and docs/flags.schema.json for editors.

python -m rlhf_suite.config.export
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from rlhf_suite.config.flags import FlagInfo, by_section, walk
from rlhf_suite.config.formatting import described, spelled
from rlhf_suite.config.launchers import LAUNCHERS, PREFIX, settings_of
from rlhf_suite.config.runs import TASKS
from rlhf_suite.registry import KINDS, Kind

DOCS = Path(__file__).parents[3] / "docs"
JSON_TYPES = {bool: "boolean", int: "integer", float: "number", str: "string"}
LIMITS = {"gt": "exclusiveMinimum", "ge": "minimum", "lt": "exclusiveMaximum", "le": "maximum"}
OWN = r"^[^:]+:\w+$"  # <file.py>:<function>
INTERPOLATION = {"type": "string", "pattern": r"^\$\{"}
HEADER = ("| flag | default | type | meaning |", "| --- | --- | --- | --- |")
NOTE = "<!-- Generated from src/rlhf_suite/config: python -m rlhf_suite.config.export -->"


def markdown() -> str:
    """Return the table of every flag of every task by section; a section that several tasks share is written once."""
    lines = [NOTE, "", "# Flags", "", "`python run.py --help task=<task> [prefix]` prints the same."]
    for (key, rows), tasks in sorted(sections().items(), key=lambda item: item[0][0]):
        names = ", ".join(f"task={task}" for task in tasks)
        lines += ["", f"## `{key}` ({names})" if key else f"## The run itself ({names})", ""]
        lines += [*HEADER, *rows]
    for name, settings in LAUNCHERS.items():
        lines += ["", f"## `{PREFIX}`: {settings.__doc__}", "", *HEADER, *map(row, settings_of(name))]
    for algorithm in KINDS.values():
        lines += algorithms(algorithm)
    return "\n".join(lines) + "\n"


def algorithms(algorithm: Kind) -> Iterator[str]:
    """Yield the table of the suite's own algorithms of a kind, as they are declared at their functions."""
    flags = dict.fromkeys(
        info.key for root in TASKS.values() for info in walk(root) if info.meta.algorithms is algorithm
    )
    if not flags:
        return
    yield from ("", f"## {algorithm.title[0].upper()}{algorithm.title[1:]}", "")
    yield f"Chosen by {', '.join(f'`{key}`' for key in flags)}."
    yield f"Your own: `<file.py>:<function>` with `{algorithm.signature('<function>')}` (docs/own_code.md)."
    if algorithm.names():
        yield from ("", "| name | meaning | needs | flags that it reads |", "| --- | --- | --- | --- |")
    for name, each in algorithm.builtin().items():
        cells = (f"`{name}`", each.help, ", ".join(each.needs), ", ".join(f"`{flag}`" for flag in each.reads or ()))
        yield "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def sections() -> dict[tuple[str, tuple[str, ...]], list[str]]:
    """Return the tasks that have a section, by the key of the section and its table."""
    found: dict[tuple[str, tuple[str, ...]], list[str]] = {}
    for task, root in TASKS.items():
        for key, infos in by_section(info for info in walk(root) if info.key != "task").items():
            found.setdefault((key, tuple(map(row, infos))), []).append(task)
    return found


def row(info: FlagInfo) -> str:
    cells = (f"`{info.key}`", f"`{spelled(info.default)}`", described(info), info.help)
    return "| " + " | ".join(cell.replace("|", "\\|").replace("\n", "\\n") for cell in cells) + " |"


def schema() -> dict[str, Any]:
    """Return the JSON schema of a whole configuration; `$defs` has one for each task."""
    tasks = {task: {**nested(walk(root)), "description": root.__doc__} for task, root in TASKS.items()}
    for task in tasks.values():
        task["properties"] |= {"defaults": {"type": "array"}, "hydra": {"type": "object"}}
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "rlhf_suite",
        "anyOf": [{"$ref": f"#/$defs/{task}"} for task in tasks],
        "$defs": tasks,
    }


def nested(infos: Iterable[FlagInfo]) -> dict[str, Any]:
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
    if expected.base is dict:
        yield {"type": "object", "additionalProperties": nested(walk(expected.section))}
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


def write(folder: Path = DOCS) -> None:
    """Write both files."""
    folder.mkdir(exist_ok=True)
    (folder / "flags.md").write_text(markdown())
    (folder / "flags.schema.json").write_text(json.dumps(schema(), indent=1) + "\n")


if __name__ == "__main__":
    write()
