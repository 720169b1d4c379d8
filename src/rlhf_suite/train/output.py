"""The models that a run leaves: each is marked as the run's own, and nothing that the run did not write makes way.

`rlhf_suite.json` in a model's folder names the run and lists the files as they were written. A run that is continued
replaces its own earlier model as long as nobody has changed it. Whatever else is in the place of a model stays there,
and the model goes beside it, as `<name>-1`. Checkpoints inside the folder of the model stay where they are.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Collection
from pathlib import Path

from rlhf_suite.disk import DiskError, flush, name_disk_errors, put, resolve_home, settle, write_json
from rlhf_suite.run_folders.run_folder import RunFolder
from rlhf_suite.tracking.console import show_line

MARK = "rlhf_suite.json"
CLOCK_S = 0.01  # a file system may round the time of a file's last change


def final_folder(output_dir: str | None, folder: RunFolder) -> Path:
    """Where the final model of a run goes; links are followed, so that no link is replaced by a folder."""
    return (resolve_home(output_dir) if output_dir else folder.model).resolve()


def deliver(
    write: Callable[[Path], object], path: Path, folder: RunFolder, name: str, keep: Path | None = None
) -> Path:
    """Have a model written and put it at `path`; returns where it is, which is `outputs[name]` of the run's status.

    `write` gets the path of a folder to make; it may make others with longer names beside it. `keep`, the folder of
    checkpoints, stays where it is if it is inside `path`. Where `path` cannot be written any more, the model goes to
    the run folder: it is not lost after a long training.

    Raises:
        DiskError: it can be written nowhere.
    """
    places = [path] if path == folder.model.resolve() else [path, folder.model.resolve()]
    for place in places:
        try:
            return write_beside(write, place, folder, name, keep)
        except DiskError as error:
            if place == places[-1]:
                raise
            show_line(f"{error}. The model goes to {places[-1]} instead", to_stderr=True)
    raise AssertionError("unreachable: there is a last place")


def write_beside(write: Callable[[Path], object], path: Path, folder: RunFolder, name: str, keep: Path | None) -> Path:
    """Have a model written beside `path`, and put all that was written in its place."""
    run = folder.run_id
    aside = path.parent / f".{path.name}.{run[:8]}.new"
    with name_disk_errors(path):
        shutil.rmtree(aside, ignore_errors=True)  # of this run, which was killed
        aside.mkdir(parents=True)
        try:
            write(aside / path.name)
            for made in aside.iterdir():
                mark(made, run)
        except BaseException:
            shutil.rmtree(aside, ignore_errors=True)
            raise
        for made in sorted(aside.iterdir()):
            place = replace_model(made, path.with_name(made.name), run, keep)
            folder.record_model(name + made.name.removeprefix(path.name), place)
        aside.rmdir()
    return Path(folder.status()["outputs"][name])


def mark(model: Path, run: str) -> None:
    """Write into a model's folder whose it is and what it holds, and have all of it on the disk."""
    write_json(model / MARK, {"run": run, "files": {name: stamp(file) for name, file in files(model).items()}})
    settle(model)


def replace_model(made: Path, path: Path, run: str, keep: Path | None = None) -> Path:
    """Rename a new model to `path`, in place of the run's own earlier one; returns where it is."""
    if keep is not None and is_within(keep, path) and fill_folder(made, path, run, keep):
        return path
    old = path.with_name(f".{path.name}.{run[:8]}.old")
    shutil.rmtree(old, ignore_errors=True)
    if is_own(path, [run]):
        path.rename(old)
    place = put(made, path)
    shutil.rmtree(old, ignore_errors=True)
    if place != path:
        show_line(f"{path} was not written by this run, so it stays; the model is in {place}", to_stderr=True)
    return place


def is_within(inner: Path, outer: Path) -> bool:
    """Whether a folder is inside another one, at any depth."""
    return inner != outer and inner.is_relative_to(outer)


def fill_folder(made: Path, path: Path, run: str, keep: Path) -> bool:
    """Move the files of a new model into the folder `path`, in place of those of the run's own earlier one, so that
    `keep` inside it is never moved. Whether this was done: not if something else is there.

    A kill on the way leaves some of the files that the mark lists, which the next call takes for the run's own.
    """
    there = files(path, keep)
    has_room = path.is_dir() and not (made / keep.relative_to(path).parts[0]).exists()
    if not has_room or (there and not is_own(path, [run], keep)):
        return False
    for file in there.values():
        file.unlink()
    (made / MARK).replace(path / MARK)
    for name, file in files(made).items():
        (path / name).parent.mkdir(parents=True, exist_ok=True)
        file.replace(path / name)
    shutil.rmtree(made)
    flush(path)
    return True


def is_own(model: Path, runs: Collection[str], keep: Path | None = None) -> bool:
    """Whether one of `runs` wrote this folder, and nobody has added or changed a file since. What is in the folder
    `keep` inside it does not count; with one, files may be missing, as a kill on the way leaves them."""
    try:
        said = json.loads((model / MARK).read_text(encoding="utf-8"))
        was, there = said["files"], files(model, keep)
        is_whole = was.keys() == there.keys() or (keep is not None and was.keys() > there.keys())
        return said["run"] in runs and is_whole and all(same(was[name], file) for name, file in there.items())
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return False


def files(model: Path, keep: Path | None = None) -> dict[str, Path]:
    """All files below a model's folder but the mark and those in the folder `keep`, by their names in it."""
    files = {path.relative_to(model).as_posix(): path for path in model.rglob("*") if not path.is_dir()}
    kept = () if keep is None else [name for name, file in files.items() if file.is_relative_to(keep)]
    return {name: file for name, file in files.items() if name != MARK and name not in kept}


def stamp(file: Path) -> list[float]:
    """Size and time of the last change."""
    status = os.lstat(file)
    return [status.st_size, status.st_mtime]


def same(was: list[float], file: Path) -> bool:
    size, changed = stamp(file)
    return size == was[0] and abs(changed - was[1]) < CLOCK_S
