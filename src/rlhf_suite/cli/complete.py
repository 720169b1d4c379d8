"""Shell completion (`-sc query=bash`): commands, flags of the chosen task, presets, and values where they are
known."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from pathlib import Path

from rlhf_suite.cli.commands import COMMANDS
from rlhf_suite.composition.arguments import ALIASES, SWITCHES, VALUED, parse
from rlhf_suite.composition.presets import group_names, preset_names
from rlhf_suite.config.declarations.flags import FlagInfo
from rlhf_suite.config.declarations.runs import TASKS, flags_of


def answer() -> int:
    """Print one candidate per line for the line that the shell hands over in COMP_LINE and COMP_POINT."""
    line = os.environ.get("COMP_LINE", "")
    line = line[: int(os.environ.get("COMP_POINT", len(line)))]
    print("\n".join(candidates(line)))
    return 0


def candidates(line: str) -> list[str]:
    """Return the completions of the last word of a command line."""
    words = line.split(" ")
    word = words[-1]
    chosen = next((one.partition("=")[2] for one in words[:-1] if one.startswith("task=")), None)
    infos = flags_of(chosen if chosen in TASKS else None)
    key, equals, value = word.partition("=")
    if not equals:
        options = [*SWITCHES, *VALUED, *ALIASES] if word.startswith("-") else []
        groups = [f"{name}=" for name in group_names()]
        commands = COMMANDS if len(words) == 2 else ()  # the first word after the program
        names = (name for name in (*options, *groups, *commands) if name.startswith(word))
        return sorted({*next_parts(word, infos), *names})
    before, comma, start = value.rpartition(",")
    parsed = parse([earlier for earlier in words[1:-1] if earlier])
    matching = [name for name in values(key, infos, parsed.own_presets) if name.startswith(start)]
    return [f"{key}={before}{comma}{name}" for name in matching]


def next_parts(word: str, keys: Iterable[str]) -> Iterator[str]:
    """Yield the keys that begin with the word, up to the next dot: `al` gives `algo.`, and `algo.kl.e` gives
    `algo.kl.estimator=`."""
    for key in keys:
        if key.startswith(word):
            part, dot, _ = key[len(word) :].partition(".")
            yield f"{word}{part}{dot or '='}"


def values(key: str, infos: dict[str, FlagInfo], own: Path | None) -> list[str]:
    """Return the values that a group of presets (with those of the user's folder `own`) or a flag is known to take."""
    if key not in infos or key == "task":
        return preset_names(key, own)
    info = infos[key]
    known = [str(choice) for choice in info.meta.choices or ()]
    known += ["true", "false"] if info.type.base is bool else []
    return known + (["null"] if info.type.optional else [])
