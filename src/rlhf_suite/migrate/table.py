"""A conversion flag by flag: what became of each flag of a command, and where each new one comes from."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rlhf_suite.config.check.names import SECRETS
from rlhf_suite.migrate.command import Migrated
from rlhf_suite.migrate.shell_text import readable

HEAD = "| OpenRLHF | here |\n|---|---|"
NO_FLAG = "(no flag alone)"  # the launcher, a default of OpenRLHF, or several flags together


def table(new: Migrated) -> str:
    """Return a table in Markdown with a row for each old flag, and for each new flag that no old one gave."""
    lines = [f"| {cell(old)} | {'; '.join(map(cell, fates))} |" for old, fates in rows(new)]
    return "\n".join([HEAD, *lines])


def rows(new: Migrated) -> Iterator[tuple[str, list[str]]]:
    """Yield each old flag with all that became of it, in the order of the command, then what has no old flag."""
    told = set[str]()
    for trace in new.traces:
        name = f"--{trace.name}" if trace.name in SECRETS else " ".join([f"--{trace.name}", *map(show, trace.values)])
        fates = [*describe_results(new, trace.done), *map(describe_loss, trace.lost)]
        told.update(fates)
        yield name, fates or ["nothing is needed for it"]
    others = [*(f"{key}={value}" for key, value in new.flags.items()), *new.remarks, *map(describe_loss, new.lost)]
    for text in others:
        if text not in told:
            yield NO_FLAG, [text]


def describe_results(new: Migrated, done: Sequence[str]) -> list[str]:
    """Return what became of all that a flag wrote and said, without remarks that a later one repeats."""
    fates = [*dict.fromkeys(fate(new, text) for text in done)]
    repeated = [text for place, text in enumerate(fates) if any(text in later for later in fates[place + 1 :])]
    return [text for text in fates if text not in repeated or text.partition("=")[0] in new.flags]


def describe_loss(text: str) -> str:
    return f"LOST: {text}"


def fate(new: Migrated, text: str) -> str:
    """Return what became of something that a flag wrote or said: later rules may change or leave out what it wrote."""
    key, equals, _ = text.partition("=")
    if not equals or " " in key:
        return text
    if key in new.flags:
        return f"{key}={new.flags[key]}"
    return next((remark for remark in (*new.remarks, *map(describe_loss, new.lost)) if f"{key}=" in remark), text)


def show(value: str) -> str:
    return value if value and " " not in value else repr(value)


def cell(text: str) -> str:
    """Return a text as the cell of a table."""
    return " ".join(readable(text).split()).replace("|", "\\|")
