"""The page of one run or of several: one file that needs neither a server nor the network. `watch.py` serves the same
page while runs go on.

The page consists of the files in `page/`. Plotly draws; it and all data are in the page, compressed, as base64, which
cannot end a script block. A content security policy allows the scripts of the page by their digests and nothing else.
What models wrote is shown as text only, never as HTML.
"""

from __future__ import annotations

import base64
import gzip
import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from string import Template
from typing import Any

from rlhf_suite.disk import write_text
from rlhf_suite.errors import UserError
from rlhf_suite.report.run_data import run_data
from rlhf_suite.report.sample_data import Arrays, Room
from rlhf_suite.report.sample_files import Reader
from rlhf_suite.report.sweep_data import SweptRun, sweep_data
from rlhf_suite.run_folders.run_folder import RunFolder

NAME = "report.html"
MARK, HEAD_BYTES = b'content="rlhf_suite"', 4096  # what the beginning of each page has
PARTS = Path(__file__).parent / "page"
# In the order in which they need each other.
SCRIPTS = ("basics", "charts", "overview", "curves", "timing", "tokens", "samples", "configuration", "sweep", "main")


@dataclass(frozen=True)
class Shown:
    """The runs that a page shows: its title, their folders and names, and of a sweep the values of its flags too."""

    title: str
    folders: Sequence[Path]
    names: Sequence[str]
    swept: Sequence[SweptRun] | None = None


def choose_runs(folders: Sequence[Path]) -> Shown:
    """Return what a page of the runs in `folders` shows."""
    names = names_of(folders)
    return Shown(names[0] if len(names) == 1 else "Comparison", folders, names)


def choose_sweep(folder: Path, runs: Sequence[SweptRun]) -> Shown:
    """Return what the page of a sweep shows: its runs that have begun.

    Raises:
        UserError: no run has begun.
    """
    begun = [run for run in runs if RunFolder(run.folder).status_file.exists()]
    if not begun:
        raise UserError(f"{folder} is the folder of a sweep of which no run has begun: wait for one")
    return Shown(folder.resolve().name, [run.folder for run in begun], [run.name for run in begun], begun)


def write_report(folders: Sequence[Path], target: Path | None = None) -> Path:
    """Write the page of the runs in `folders`, and return its path: `target`, else in the folder of the only run, or in
    the working directory.

    Raises:
        UserError: a folder has no run, or Plotly is not installed.
    """
    return write_page(choose_runs(folders), target or (folders[0] / NAME if len(folders) == 1 else Path(NAME)))


def write_sweep_report(folder: Path, runs: Sequence[SweptRun], target: Path | None = None) -> Path:
    """Write the page of a sweep whose runs have begun, and return its path: `target`, else in the folder of the sweep.

    Raises:
        UserError: no run has begun, or Plotly is not installed.
    """
    return write_page(choose_sweep(folder, runs), target or folder / NAME)


def content_of(shown: Shown, reader: Reader) -> tuple[dict[str, Any], Arrays]:
    """Return the data of a page (`main.js` says what they are) and the numbers of its samples. The runs share the room
    of the page.

    Raises:
        UserError: a folder has no run.
    """
    arrays, room = Arrays(), Room().divide(len(shown.folders))
    runs = [
        run_data(RunFolder(folder), name, arrays, room, reader)
        for folder, name in zip(shown.folders, shown.names, strict=True)
    ]
    swept = None if shown.swept is None else sweep_data(shown.swept, runs)
    return {"title": shown.title, "runs": runs, "sweep": swept}, arrays


def try_writing(write: Callable[[], Path]) -> str:
    """Write a page at the end of a run or a sweep, which does not fail with it; return where it is, or why not."""
    try:
        return f"Report: {write()}"
    except Exception as error:
        return f"{NAME} was not written: {type(error).__name__}: {error}"


def names_of(folders: Sequence[Path]) -> list[str]:
    """Return as few of the last parts of each path as tell the folders apart, as one name each."""
    whole = [folder.resolve().parts for folder in folders]
    for count in range(1, max(map(len, whole)) + 1):
        names = ["/".join(parts[-count:]) for parts in whole]
        if len(set(names)) == len(names):
            return names
    return [str(folder) for folder in folders]


def write_page(shown: Shown, path: Path) -> Path:
    """Write the page of runs and return its path.

    Raises:
        UserError: a folder has no run, there is a file that is not such a page, or Plotly is not installed.
    """
    if path.exists() and not is_page(path):
        raise UserError(f"{path} is there, and it is not a page of this suite: move it, or write another one with -o")
    data, arrays = content_of(shown, Reader())
    write_text(path, page(pack(to_json(data)), pack(b"".join(arrays.parts))))
    return path


def to_json(data: Mapping[str, Any]) -> bytes:
    """Return data as JSON in one line."""
    return json.dumps(data, separators=(",", ":"), allow_nan=False).encode()


def page(data: str, arrays: str, live: bool = False) -> str:
    """Return a page with these packed data; with `live` it has none, but asks the server that it came from for them.

    Raises:
        UserError: Plotly is not installed.
    """
    script = "".join((PARTS / f"{name}.js").read_text(encoding="utf-8") for name in SCRIPTS)
    library = plotly()
    policy = f"default-src 'none'; script-src {digest(script)} {digest(library)}; style-src 'unsafe-inline'; "
    policy += "connect-src 'self'; " if live else ""
    return Template((PARTS / "page.html").read_text(encoding="utf-8")).substitute(
        policy=policy + "img-src data: blob:; base-uri 'none'; form-action 'none'",
        kind="live" if live else "file",
        style=(PARTS / "page.css").read_text(encoding="utf-8"),
        script=script,
        library=pack(library.encode()),
        data=data,
        arrays=arrays,
    )


def is_page(path: Path) -> bool:
    """Return whether a file is a page that this module wrote, which another one may replace."""
    if not path.is_file():
        return False
    with path.open("rb") as file:
        return MARK in file.read(HEAD_BYTES)


def plotly() -> str:
    """Return the code of Plotly, which its Python package brings with it.

    Raises:
        UserError: the package is not installed.
    """
    spec = find_spec("plotly")
    if spec is None or spec.origin is None:
        raise UserError("report.html is drawn by Plotly, which is not installed: pip install plotly")
    return (Path(spec.origin).parent / "package_data" / "plotly.min.js").read_text(encoding="utf-8")


def pack(content: bytes) -> str:
    """Return bytes compressed and as base64. The same bytes give the same text."""
    return base64.b64encode(gzip.compress(content, 6, mtime=0)).decode()


def digest(script: str) -> str:
    """Return the digest of a script as a content security policy names it."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()}'"
