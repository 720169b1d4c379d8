"""Tasks of reasoning-gym as rows: `reasoning_gym:<task>`, followed by settings of the task.

    reasoning_gym:chain_sum                                500 rows of seed 0
    reasoning_gym:chain_sum/size:2000/seed:1/max_terms:3   more rows, another seed, and easier ones

A row has `input` (the question), `output` (the right response; null if a task has no single one), `label` (task,
settings and entry, which the task's own scoring needs) and `datasource` (the task).
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from difflib import get_close_matches
from importlib.metadata import distribution
from pathlib import Path
from typing import Any

from rlhf_suite.config.check.lacking import REASONING_GYM, refuse_missing
from rlhf_suite.config.check.sources import GYM
from rlhf_suite.config.declarations.flag_types import literal
from rlhf_suite.data.row import Row, RowError
from rlhf_suite.errors import UserError

Settings = dict[str, Any]


@dataclass(frozen=True)
class GymTask:
    """A task of reasoning-gym with its settings. `dataset` is reasoning-gym's own object."""

    name: str
    settings: Settings
    dataset: Any

    def rows(self, source: str) -> Iterator[Row | RowError]:
        """Yield every entry, in order. Equal settings give equal rows."""
        for index in range(len(self.dataset)):
            row = Row({}, source, index + 1)
            entry = plain(self.dataset[index])
            label = repr({"task": self.name, "settings": self.settings, "entry": entry})
            try:
                ast.literal_eval(label)
            except (ValueError, SyntaxError):
                yield RowError(row.where, "the entry holds a value that cannot be written as text")
                continue
            question, answer = entry["question"], entry["answer"]
            values = {"input": question, "output": answer, "label": label, "datasource": self.name}
            yield Row(values, source, row.line)


def task_of(source: str, flag: str) -> GymTask:
    """Return the task of `reasoning_gym:<task>/<setting>:<value>/...`.

    Raises:
        UserError: reasoning-gym is not installed, or has no such task or setting; the message lists the alternatives.
    """
    refuse_missing(f"{flag}={source}", REASONING_GYM)
    name, *words = source.removeprefix(GYM).split("/")
    settings: Settings = {"seed": 0}  # the default of reasoning-gym is a new seed every time
    for word in words:
        key, colon, value = word.partition(":")
        if not colon:
            raise UserError(f"{flag}={source}: {word!r} is not a setting; write {GYM}{name}/<setting>:<value>")
        settings[key] = literal(value)
    return make(name, settings, f"{flag}={source}")


def make(name: str, settings: Settings, where: str) -> GymTask:
    """Return the task. `where` is the beginning of the error message if there is no such task or setting."""
    from reasoning_gym.factory import DATASETS, create_dataset

    if name not in DATASETS:
        near = get_close_matches(name, DATASETS, n=3, cutoff=0.5)
        hint = f"did you mean {' or '.join(GYM + task for task in near)}?" if near else f"Tasks: {', '.join(DATASETS)}"
        raise UserError(f"{where}: reasoning-gym has no task {name!r}; {hint}")
    known = [field.name for field in fields(DATASETS[name][1])]
    if unknown := sorted(settings.keys() - set(known)):
        raise UserError(f"{where}: {name} has no setting {', '.join(unknown)}; it has {', '.join(known)}")
    try:
        return GymTask(name, settings, create_dataset(name, **settings))
    except (AssertionError, TypeError, ValueError) as error:  # raised by the validation of the settings
        raise UserError(f"{where}: {name} does not accept these settings: {error}") from None


def version_files() -> list[Path]:
    """Return files that change with the version of reasoning-gym, and its entries may change with it."""
    files = distribution("reasoning-gym").files or []
    return [Path(str(file.locate())) for file in files if file.name == "METADATA"]


def plain(value: Any) -> Any:
    """Return the value in Python's own types, which can be written as text and read again.

    Tuples stay tuples, since some tasks compare with them.
    """
    if isinstance(value, Mapping):
        return {plain(key): plain(item) for key, item in value.items()}
    for kind in (tuple, list, set):
        if isinstance(value, kind):
            return kind(plain(item) for item in value)
    if isinstance(value, str):
        return str(value)
    return value.item() if hasattr(value, "item") else value  # numpy's numbers
