"""The page of one run or of several: one file that needs neither a server nor the network.

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
from importlib.util import find_spec
from pathlib import Path
from string import Template
from typing import Any

from rlhf_suite.disk import write_text
from rlhf_suite.errors import UserError
from rlhf_suite.report.run_data import run_data
from rlhf_suite.report.sample_data import Arrays, Room
from rlhf_suite.report.sweep_data import SweptRun, sweep_data
from rlhf_suite.tracking.run_folder import RunFolder

NAME = "report.html"
MARK, HEAD_BYTES = b'content="rlhf_suite"', 4096  # what the beginning of each page has
PARTS = Path(__file__).parent / "page"
# In the order in which they need each other.
SCRIPTS = ("basics", "charts", "overview", "curves", "timing", "tokens", "samples", "configuration", "sweep", "main")


def write_report(folders: Sequence[Path], target: Path | None = None) -> Path:
    """Write the page of the runs in `folders`, and return its path: `target`, else in the folder of the only run, or in
    the working directory.

    Raises:
        UserError: a folder has no run, or Plotly is not installed.
    """
    names = names_of(folders)
    arrays, runs = all_data(folders, names)
    path = target or (folders[0] / NAME if len(folders) == 1 else Path(NAME))
    write_page(path, {"title": names[0] if len(names) == 1 else "Comparison", "runs": runs, "sweep": None}, arrays)
    return path


def write_sweep_report(folder: Path, runs: Sequence[SweptRun], target: Path | None = None) -> Path:
    """Write the page of a sweep whose runs have begun, and return its path: `target`, else in the folder of the sweep.

    Raises:
        UserError: no run has begun, or Plotly is not installed.
    """
    begun = [run for run in runs if RunFolder(run.folder).status_file.exists()]
    if not begun:
        raise UserError(f"{folder} is the folder of a sweep of which no run has begun: wait for one")
    arrays, shown = all_data([run.folder for run in begun], [run.name for run in begun])
    path = target or folder / NAME
    write_page(path, {"title": folder.resolve().name, "runs": shown, "sweep": sweep_data(begun, shown)}, arrays)
    return path


def try_writing(write: Callable[[], Path]) -> str:
    """Write a page at the end of a run or a sweep, which does not fail with it; return where it is, or why not."""
    try:
        return f"Report: {write()}"
    except Exception as error:
        return f"{NAME} was not written: {type(error).__name__}: {error}"


def all_data(folders: Sequence[Path], names: Sequence[str]) -> tuple[Arrays, list[dict[str, Any]]]:
    """Return the data of runs, which share the room of a page, and the numbers of their samples."""
    arrays, room = Arrays(), Room().divide(len(folders))
    return arrays, [
        run_data(RunFolder(folder), name, arrays, room) for folder, name in zip(folders, names, strict=True)
    ]


def names_of(folders: Sequence[Path]) -> list[str]:
    """Return as few of the last parts of each path as tell the folders apart, as one name each."""
    whole = [folder.resolve().parts for folder in folders]
    for count in range(1, max(map(len, whole)) + 1):
        names = ["/".join(parts[-count:]) for parts in whole]
        if len(set(names)) == len(names):
            return names
    return [str(folder) for folder in folders]


def write_page(path: Path, data: Mapping[str, Any], arrays: Arrays) -> None:
    """Write the page that shows `data` (`main.js` says what it holds) and the numbers in `arrays`.

    Raises:
        UserError: there is a file that is not such a page, or Plotly is not installed.
    """
    if path.exists() and not is_page(path):
        raise UserError(f"{path} is there, and it is not a page of this suite: move it, or write another one with -o")
    script = "".join((PARTS / f"{name}.js").read_text(encoding="utf-8") for name in SCRIPTS)
    library = plotly()
    policy = f"default-src 'none'; script-src {digest(script)} {digest(library)}; style-src 'unsafe-inline'; "
    page = Template((PARTS / "page.html").read_text(encoding="utf-8")).substitute(
        policy=policy + "img-src data: blob:; base-uri 'none'; form-action 'none'",
        style=(PARTS / "page.css").read_text(encoding="utf-8"),
        script=script,
        library=pack(library.encode()),
        data=pack(json.dumps(data, separators=(",", ":"), allow_nan=False).encode()),
        arrays=pack(b"".join(arrays.parts)),
    )
    write_text(path, page)


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
