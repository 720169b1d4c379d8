"""Which flags do something in a run, and which of those nothing below the command line read; see tests/recording."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rlhf_suite.composition.arguments import parse
from rlhf_suite.config.declarations.flags import FlagInfo, all_values, walk
from rlhf_suite.config.declarations.runs import Run
from rlhf_suite.config.rules.check_run import list_flags_without_ray
from rlhf_suite.preflight.jobs import preflight

RECORDING = Path(__file__).parent / "recording"
Read = tuple[str, str]  # (section class, field)


def environment(file: Path | str) -> dict[str, str]:
    """What makes a process and all its children record in `file`."""
    tests = Path(__file__).parent
    path = [str(RECORDING), str(tests.parent / "src"), str(tests), os.environ.get("PYTHONPATH", "")]
    return {"PYTHONPATH": os.pathsep.join(filter(None, path)), "RLHF_SUITE_FLAG_READS": str(file)}


def unread(lines: list[list[str]], files: list[Path]) -> set[str]:
    """Dotted keys of the flags that do something under some of the command lines, and were read in no run."""
    wanted: dict[Read, str] = {}
    for words in lines:
        (config,) = preflight(parse(words)).runs
        wanted |= {read: key for key, read in active(config).items()}
    found = set().union(*(reads(file) for file in files))
    return {key for read, key in wanted.items() if read not in found}


def active(config: Run) -> dict[str, Read]:
    """Every flag that does something under the values of `config`, by its dotted key: it is not refused there."""
    values, of_ray = all_values(config), list_flags_without_ray(config)
    keys = [
        info.key
        for info in walk(config)
        if all(condition.holds(values) for condition in info.meta.when)
        and may_be_set(info, values)
        and info.key not in of_ray
    ]
    return {key: (type(section(config, key)).__name__, key.rpartition(".")[2]) for key in keys}


def may_be_set(info: FlagInfo, values: Mapping[str, Any]) -> bool:
    """Whether the needs of a flag allow another value than its default. Null and false need nothing."""
    is_met = all(need.condition.holds(values) for need in info.meta.needs if need.at is None)
    return is_met or info.default is True or (info.type.optional and info.default is not None)


def section(config: Run, key: str) -> object:
    """The section that holds the flag."""
    found: object = config
    for name in key.split(".")[:-1]:
        found = getattr(found, name)
    return found


def reads(file: Path) -> set[Read]:
    """What `sitecustomize` noted."""
    lines = file.read_text().splitlines()
    return {(owner, name) for owner, _, name in (line.partition(" ") for line in lines)}
