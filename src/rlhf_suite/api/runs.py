"""A run as an object: its state, metrics, samples and results, read from its folder."""

from __future__ import annotations

import os
from base64 import b64encode
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from html import escape
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlhf_suite.api.words import shorten
from rlhf_suite.config.declarations.runs import Run as Config
from rlhf_suite.disk import modified_at, resolve_home
from rlhf_suite.errors import UserError
from rlhf_suite.report.curves import make_picture, rows_once, series
from rlhf_suite.run_folders.record import load as load_config
from rlhf_suite.run_folders.run_folder import RunFolder, list_samples_files, samples_file

if TYPE_CHECKING:
    from rlhf_suite.report.html import Shown

LEVELS = 3  # of folders that are searched for runs
MOST = 40  # runs of a folder on one page
NAME_LIMIT = 500  # characters of a path in a message


@dataclass(frozen=True)
class Run(os.PathLike[str]):
    """A run in its folder, which may still be going on: everything is read when it is asked for. As the value of a flag
    it is its folder."""

    folder: Path

    def __post_init__(self) -> None:
        object.__setattr__(self, "folder", path_to(self.folder))

    def __fspath__(self) -> str:
        return str(self.folder)

    @property
    def status(self) -> str:
        """`new`, `running`, `done`, `stopped` or `failed`."""
        return str(self.record.status()["state"])

    @property
    def error(self) -> str | None:
        """Why the run failed or stopped, if it did."""
        return self.record.status()["error"]

    @property
    def last_step(self) -> int:
        """The last optimiser step, from 1."""
        return int(self.record.status()["last_step"])

    @property
    def results(self) -> dict[str, float]:
        """The last metrics of a run that is done."""
        return dict(self.record.status()["metrics"])

    @property
    def metrics(self) -> Any:
        """The metrics of all steps, a table with the column `step`: of pandas if that is installed, else of PyArrow."""
        return as_table(rows_once(self.record.metrics) if self.record.metrics.exists() else [])

    def samples(self, step: int) -> Any:
        """Return the rollouts of a step (from 1), a table with a row per sample.

        Raises:
            UserError: the run has kept none of this step.
        """
        return read_samples(self.record.rollouts, step)

    def evaluation(self, step: int) -> Any:
        """Return the samples of the evaluation after a step (0: before the first), a table with a row per sample.

        Raises:
            UserError: there is none after this step.
        """
        return read_samples(self.record.evaluations, step)

    @property
    def config(self) -> Config:
        """The resolved configuration, with types."""
        return load_config(self.record.config)

    @property
    def model(self) -> Path | None:
        """The folder of the model that the run made, if there is one: `model=` of another run takes it."""
        return self.record.model if self.record.model.exists() else None

    @property
    def report(self) -> Path | None:
        """The page of the run, if it has one."""
        page = self.folder / "report.html"
        return page if page.exists() else None

    def why(self) -> str:
        """Return what `rlhf-suite why` says: what the run is doing, what it waits for, or how it ended."""
        from rlhf_suite.api.why import describe_run

        return "\n".join(describe_run(self.record)[1])

    def stamp(self) -> object:
        """Return what changes when there is more to see of the run: its state and the size of its metrics."""
        metrics = self.record.metrics
        return self.status, metrics.stat().st_size if metrics.exists() else 0

    @property
    def record(self) -> RunFolder:
        """The paths of the run's files."""
        return RunFolder(self.folder)

    def _repr_html_(self) -> str:
        """Return what a notebook shows: the state, a table of the headline metrics as they changed, and the curves."""
        from rlhf_suite.report.summary import change, headlines

        lines = [f"<b>{escape(str(self.folder))}</b>: {self.status}, step {self.last_step}"]
        lines += [escape(self.error)] if self.error else []
        curves = series(self.record.metrics)
        shown = {name: change(name, curves) for name in headlines(curves)}
        if not shown:  # of a task that does not train
            shown = {name: f"{value:.4g}" for name, value in self.results.items() if value is not None}
        rows = (f"<tr><td>{escape(name)}</td><td>{escape(text)}</td></tr>" for name, text in shown.items())
        picture = ""
        with suppress(UserError):  # such as a task without curves
            picture = f'<img width="720" src="data:image/png;base64,{b64encode(make_picture(self.record)).decode()}">'
        return f"{'<br>'.join(lines)}<table>{''.join(rows)}</table>{picture}"


def load(folder: str | os.PathLike[str]) -> Run:
    """Return the run in a folder, whoever started it.

    Raises:
        UserError: the folder has no run.
    """
    return Run(find_record(folder).path.resolve())


def path_to(folder: str | os.PathLike[str]) -> Path:
    """Return a folder or file that a call names, which need not exist.

    Raises:
        UserError: it is not a path, or this user may not look into it.
    """
    if not isinstance(folder, str | os.PathLike):
        raise UserError(f"{shorten(folder)} is not a folder. Give its path, or a run")
    path = resolve_home(folder)
    try:
        os.stat(path / ".")  # noqa: PTH116 (a Path leaves the point out, which asks for the right to enter a folder)
    except (FileNotFoundError, NotADirectoryError):
        pass
    except (OSError, ValueError) as error:  # a name that is too long, no permission, a zero byte
        reason = error.strerror if isinstance(error, OSError) else error
        raise UserError(
            f"{os.fspath(folder)[:NAME_LIMIT]} cannot be read: {reason}. Check the path and its permissions"
        ) from None
    return path


def find_record(folder: str | os.PathLike[str]) -> RunFolder:
    """Return the files of the run in a folder. Raises UserError if it has none."""
    record = RunFolder(path_to(folder))
    if not record.status_file.exists():
        raise UserError(f"{record.path} is not the folder of a run: it has no {record.status_file.name}")
    return record


def write_report(*runs: str | os.PathLike[str], file: str | os.PathLike[str] | None = None) -> Path:
    """Write the page of a run, of several runs beside each other, of a sweep, or of the runs in a folder, and return
    its path. A run writes its page at its end; this is also for one that works or was killed. `file` is where it goes,
    by default report.html in the folder, or of several runs in the current folder.

    Raises:
        UserError: a folder has no run.
    """
    from rlhf_suite.report import html

    folders = [*map(path_to, runs)]
    if not folders:
        raise UserError("write_report: no run is named. Give the folder of a run or a sweep, or several")
    place = folders[0] if len(folders) == 1 else Path()
    return html.write_page(choose_runs(folders), place / html.NAME if file is None else path_to(file))


def choose_runs(folders: Sequence[Path]) -> Shown:
    """Return what a page of these folders shows: a run, several runs, a sweep, or the runs in a folder.

    Raises:
        UserError: a folder has no run.
    """
    from rlhf_suite.report import html
    from rlhf_suite.run_folders.sweep_folder import read
    from rlhf_suite.sweeps.table import runs_of

    sweep = read(folders[0]) if len(folders) == 1 else None
    if sweep is not None and not sweep.is_single:
        return html.choose_sweep(sweep.folder, runs_of(sweep))
    if len(folders) == 1 and (below := runs_below(folders[0])):
        return replace(html.choose_runs(below), title=folders[0].resolve().name)
    return html.choose_runs([find_record(folder).path for folder in folders])


def runs_below(folder: Path) -> list[Path]:
    """Return the folders of the runs in a folder that is not one itself, at most LEVELS deep: of more than MOST runs
    those that changed last."""
    level, runs = [folder], list[Path]()
    if RunFolder(folder).status_file.exists():
        return []
    for _ in range(LEVELS):
        below = [Path(entry.path) for place in level for entry in folders_in(place)]
        runs += [place for place in below if RunFolder(place).status_file.exists()]
        level = [place for place in below if not RunFolder(place).status_file.exists()]
    newest = sorted(runs, key=lambda place: modified_at(RunFolder(place).status_file))[-MOST:]
    return sorted(newest)


def folders_in(place: Path) -> list[os.DirEntry[str]]:
    """Return the folders in a folder, none if it cannot be read."""
    try:
        with os.scandir(place) as entries:
            return [entry for entry in entries if entry.is_dir(follow_symlinks=False)]
    except OSError:
        return []


def as_table(rows: Sequence[Mapping[str, Any]]) -> Any:
    """Return rows as a table: of pandas if that is installed, else of PyArrow."""
    if find_spec("pandas") is not None:
        import pandas

        return pandas.DataFrame(rows)
    import pyarrow

    names = dict.fromkeys(name for row in rows for name in row)
    return pyarrow.table({name: [row.get(name) for row in rows] for name in names})


def read_samples(folder: Path, step: int) -> Any:
    """Return the table of a file of samples."""
    file = samples_file(folder, step)
    if not file.exists():
        known = list_samples_files(folder)
        steps = f"those of steps {', '.join(map(str, known))}" if known else "none"
        raise UserError(f"{folder.parent} has no samples of step {step} in {folder.name}/: it has {steps}")
    if find_spec("pandas") is not None:
        import pandas

        return pandas.read_parquet(file)
    import pyarrow.parquet

    return pyarrow.parquet.read_table(file)
