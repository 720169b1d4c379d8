"""Files and folders that are there whole or not at all, and the user's cache of them."""

from __future__ import annotations

import hashlib
import os
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

ABANDONED_S = 24 * 3600  # what was begun and not touched for so long is of a run that was killed


def cache_folder(kind: str) -> Path:
    """Where things of one kind are kept between runs: below XDG_CACHE_HOME, or ~/.cache. All of it may be deleted."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "rlhf_suite" / kind


@contextmanager
def file_aside(path: Path) -> Iterator[Path]:
    """A temporary file that becomes `path` when it is on the disk; gone on an error."""
    path.parent.mkdir(parents=True, exist_ok=True)
    aside = path.parent / f".{path.name}.new.{os.getpid()}"
    try:
        yield aside
        flush(aside)
        aside.replace(path)
        flush(path.parent)
    finally:
        aside.unlink(missing_ok=True)


@contextmanager
def written_aside(path: Path, replace: bool = True) -> Iterator[Path]:
    """A temporary folder that becomes `path` when everything in it is on the disk; gone on an error.

    Without `replace` a folder that another process has put there meanwhile is kept.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    aside, old = (path.parent / f".{path.name}.{kind}.{os.getpid()}" for kind in ("new", "old"))
    shutil.rmtree(aside, ignore_errors=True)
    aside.mkdir()
    try:
        yield aside
        for file in aside.iterdir():
            flush(file)
        if replace and path.exists():
            path.rename(old)
        try:
            aside.rename(path)
        except OSError:  # a folder that is not empty is never renamed over
            if replace or not path.exists():
                if old.exists():
                    old.rename(path)
                raise
        flush(path.parent)
    finally:
        shutil.rmtree(aside, ignore_errors=True)
        shutil.rmtree(old, ignore_errors=True)


def sweep_abandoned(folder: Path) -> None:
    """Remove what killed runs began to write aside in `folder`."""
    for begun in folder.glob(".*.new.*"):
        if time.time() - max(each.stat().st_mtime for each in (begun, *begun.glob("*"))) > ABANDONED_S:
            shutil.rmtree(begun, ignore_errors=True)


def flush(path: Path) -> None:
    """Have a file, or the entries of a folder, on the disk before going on."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def file_digest(path: Path) -> str:
    with path.open("rb") as content:
        return hashlib.file_digest(content, "sha256").hexdigest()
