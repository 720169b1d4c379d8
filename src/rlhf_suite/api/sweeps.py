"""`sweep`: runs that differ in some flags, their table, and each of them as an object."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from itertools import chain
from pathlib import Path
from typing import Any

from rlhf_suite.api.rows import is_table
from rlhf_suite.api.runs import Run, as_table, path_to
from rlhf_suite.api.settings import ask, find_place, with_files
from rlhf_suite.api.start import refuse_chat, start
from rlhf_suite.api.words import plain, shorten, words_of_values
from rlhf_suite.config.check.problems import ConfigurationError
from rlhf_suite.config.declarations.flag_types import literal
from rlhf_suite.config.declarations.runs import TASKS, flags_of
from rlhf_suite.errors import UserError
from rlhf_suite.preflight.folders import for_sweep
from rlhf_suite.run_folders.sweep_folder import Sweep as Record
from rlhf_suite.run_folders.sweep_folder import read
from rlhf_suite.sweeps.slurm_jobs import look

SEEDS = ("train.seed", "rollout.seed")  # `seeds` varies the first that the task has


@dataclass(frozen=True)
class Sweep(os.PathLike[str]):
    """The runs of a sweep in its folder. It may still be going on: everything is read when it is asked for."""

    folder: Path

    def __post_init__(self) -> None:
        object.__setattr__(self, "folder", path_to(self.folder))

    def __fspath__(self) -> str:
        return str(self.folder)

    @property
    def runs(self) -> list[Run]:
        """The runs in the order of their numbers, also those that failed or have not begun."""
        record = self.record
        return [Run(record.folder_of(job).resolve()) for job in record.jobs]

    @property
    def table(self) -> Any:
        """A row per run, a table as that of `Run.metrics`: its number (`job`), what varies (a column for each flag or
        group of presets), `state`, `error`, `seconds`, `folder`, and the last metrics of those that are done."""
        return as_table(self.rows())

    @property
    def report(self) -> Path | None:
        """The page of the sweep, if it has one."""
        page = self.folder / "report.html"
        return page if page.exists() else None

    @property
    def record(self) -> Record:
        """The jobs as they are now.

        Raises:
            UserError: the folder has no sweep.
        """
        record = read(self.folder)
        if record is None:
            raise UserError(f"{self.folder} is not the folder of a sweep: it has no summary.json")
        look(record)
        return record

    def rows(self) -> list[dict[str, Any]]:
        """Return the rows of the table."""
        record, rows = self.record, list[dict[str, Any]]()
        for job in record.jobs:
            words = (word.lstrip("+").partition("=") for word in record.list_varied_words(job))
            run = Run(record.folder_of(job).resolve())
            rows.append(
                {"job": job.number, **{key: literal(value) for key, _, value in words}, "state": job.state}
                | {"error": job.error, "seconds": job.seconds, "folder": str(run.folder)}
                | (run.results if job.state == "done" else {})
            )
        return rows

    def stamp(self) -> object:
        """Return what changes when there is more to see; a sweep prints a line then."""
        return None

    def _repr_html_(self) -> str:
        rows = self.rows() if (self.folder / "summary.json").exists() else []
        names = dict.fromkeys(name for row in rows for name in row)
        head = "".join(f"<th>{escape(name)}</th>" for name in names)
        body = "".join(f"<tr>{''.join(map(cell, (row.get(name) for name in names)))}</tr>" for row in rows)
        return f"<b>{escape(str(self.folder))}</b><table><tr>{head}</tr>{body}</table>"


def cell(value: object) -> str:
    """Return a value as a cell of a table in HTML."""
    text = "" if value is None else f"{value:.4g}" if isinstance(value, float) else str(value)
    return f"<td>{escape(text)}</td>"


def sweep(
    task: str,
    grid: Mapping[str, Any] | None = None,
    seeds: int | Sequence[int] | None = None,
    **settings: Any,
) -> Sweep:
    """Run a task once for each combination of the values in `grid`, and return the sweep when all runs have ended.

    `grid` has a list of values by the name of a setting: `{"actor.adam.lr": [1e-5, 3e-5], "reward": [first, second]}`.
    `seeds=3` is `train.seed` 1, 2 and 3. The other settings are those of `run`, and those of the launcher
    (`{"hydra.launcher.parallel": 2}`, `{"hydra/launcher": "slurm"}`). A run that fails is a row of the table with its
    reason; the others go on.

    Raises:
        ConfigurationError: there are mistakes in some run; all of them are in its `problems`, and nothing was started.
        UserError: a value has no form that a run can take, or the launcher refused.
        KeyboardInterrupt: it was interrupted, and its runs have stopped.
    """
    varied = chain(words_of_grid(task, {} if grid is None else grid), words_of_seeds(task, seeds))
    line, checked = ask(task, settings, chain(["--multirun"], varied))
    refuse_chat(checked)
    folder = find_place(checked, for_sweep)
    result = Sweep(folder.resolve())
    start(line, folder, result)
    return result


def load_sweep(folder: str | os.PathLike[str]) -> Sweep:
    """Return the sweep in a folder, whoever started it.

    Raises:
        UserError: the folder has no sweep.
    """
    sweep = Sweep(path_to(folder).resolve())
    sweep.rows()
    return sweep


def words_of_grid(task: str, grid: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    """Yield a word with all values for each setting of a grid, whose names are those of `run`, nested or with dots.

    Raises:
        ConfigurationError: a setting has no list of values, or its values are of several flags.
    """
    if not isinstance(grid, Mapping):
        fix = "give a dict with a list of values for each name, as {'actor.adam.lr': [1e-5, 3e-5]}"
        raise ConfigurationError.of("grid", f"{shorten(grid)} is not a dict", fix)
    for name, values in grid.items():
        key = f"{prefix}{name}"
        if isinstance(values, Mapping) and key not in flags_of(None):
            yield from words_of_grid(task, values, f"{key}.")
            continue
        if isinstance(values, str | bytes | Mapping) or is_table(values) or not hasattr(values, "__iter__"):
            problem = f"{key}={shorten(values)} is not a list of values"
            raise ConfigurationError.of("grid", problem, f"write {key!r}: [<value>, <value>]")
        named = [pair for value in values for pair in with_files(task, {key: value})]
        names = {flag for flag, _ in named}
        if len(names) != 1:
            problem = f"has values of {' and '.join(sorted(names))}" if names else "has no values"
            raise ConfigurationError.of("grid", f"{key} {problem}", "give a list of values of one flag")
        yield words_of_values(names.pop(), [value for _, value in named])


def words_of_seeds(task: str, seeds: int | Sequence[int] | None) -> Iterator[str]:
    """Yield the word with the seeds: so many from 1, or those of a list.

    Raises:
        ConfigurationError: the task has no seed, or these are no seeds.
    """
    if seeds is None:
        return
    given, fix = shorten(seeds), "give a number of seeds, or a list of them, all different"
    key = next((flag for flag in SEEDS if flag in flags_of(task if task in TASKS else None)), None)
    if key is None:
        raise ConfigurationError.of("seeds", f"{given}: task={task} has no seed", "remove it")
    chosen = plain("seeds", seeds)
    if isinstance(chosen, int) and not isinstance(chosen, bool):
        chosen = [*range(1, chosen + 1)]
    if not isinstance(chosen, list) or not all(type(seed) is int for seed in chosen):
        raise ConfigurationError.of("seeds", f"{given} is neither a whole number nor a list of such", fix)
    if not chosen or len({*chosen}) < len(chosen):
        raise ConfigurationError.of("seeds", f"{given}: {'one is there twice' if chosen else 'there are none'}", fix)
    yield words_of_values(key, chosen)
