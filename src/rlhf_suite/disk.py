"""Files and folders that are there whole or not at all, errors of the disk in plain words, and the user's cache."""

from __future__ import annotations

import errno
import hashlib
import itertools
import json
import os
import secrets
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from rlhf_suite.errors import RunError, UserError

ABANDONED_S = 24 * 3600  # what was begun and not touched for so long is of a run that was killed
FULL = (errno.ENOSPC, errno.EDQUOT)
FULL_WORDS = ("No space left on device", "os error 28", "Disk quota exceeded")
FULL_BYTES = 64 << 10  # a library that does not say why it could not write, on a disk with less than this free
PROBE_BYTES = 16 << 10
ASIDE_CHARS = 40  # of a temporary name beside the final one, beyond the final one's own length
TAKEN = (errno.EEXIST, errno.ENOTEMPTY, errno.ENOTDIR, errno.EISDIR, errno.EBUSY)


class DiskError(RunError):
    """Something could not be written: the message names the path, the reason and the free space."""


def cache_folder(kind: str) -> Path:
    """Where things of one kind are kept between runs: below XDG_CACHE_HOME, or ~/.cache. All of it may be deleted."""
    return cache_root() / kind


def cache_root() -> Path:
    """The suite's part of the user's cache."""
    chosen = os.environ.get("XDG_CACHE_HOME")
    try:
        return (Path(chosen) if chosen else Path.home() / ".cache") / "rlhf_suite"
    except RuntimeError:  # neither HOME nor an entry in the list of users
        raise UserError("this user has no home folder for a cache: set XDG_CACHE_HOME=<a folder>") from None


def resolve_home(path: str | os.PathLike[str]) -> Path:
    """Return a path with the home folder in the place of `~` or `~user`.

    Raises:
        UserError: there is no such user, or this user has no home folder.
    """
    try:
        return Path(path).expanduser()
    except RuntimeError:
        raise UserError(
            f"{os.fspath(path)}: the home folder that ~ stands for is not known on this machine. Write the whole path"
        ) from None


@contextmanager
def name_disk_errors(path: Path) -> Iterator[None]:
    """Turn what the disk refuses inside the block into a DiskError about `path`; other errors pass.

    Libraries say "the disk is full" in many ways, and some do not say it: the free space tells then.
    """
    try:
        yield
    except DiskError:
        raise
    except Exception as error:
        reason = disk_reason(error, path)
        if reason is None:
            raise
        raise DiskError(f"{path} cannot be written: {reason}") from error


def disk_reason(error: BaseException, path: Path) -> str | None:
    """Why the disk refused a write at or below `path`; None for an error that is not the disk's."""
    if isinstance(error, UserError) or (isinstance(error, OSError) and is_elsewhere(error, path)):
        return None
    if (reason := full_reason(error, path)) is not None:
        return reason
    return os.strerror(error.errno) if isinstance(error, OSError) and error.errno is not None else None


def full_reason(error: BaseException, path: Path) -> str | None:
    """What to say when the disk of `path` is full, or the error says that a disk is; else None."""
    is_said = isinstance(error, OSError) and error.errno in FULL
    free = free_bytes(path)
    if is_said or any(words in str(error) for words in FULL_WORDS) or (free is not None and free < FULL_BYTES):
        left = "" if free is None else f" ({free / 2**20:.1f} MB are free there)"
        return f"the disk is full{left}. Free some space, or choose a folder on another disk"
    return None


def is_elsewhere(error: OSError, path: Path) -> bool:
    """Whether the error names a file that is neither `path` nor beside or below it: one that was read."""
    named = error.filename
    return isinstance(named, str | os.PathLike) and not Path(named).absolute().is_relative_to(path.absolute().parent)


def free_bytes(path: Path) -> int | None:
    """What this user may still write to the disk of `path`."""
    with suppress(OSError):
        usage = shutil.disk_usage(find_existing(path))
        return usage.free if usage.total else None  # /proc and the like have no size
    return None


def find_existing(path: Path) -> Path:
    """The path itself or the nearest folder above it that is there."""
    for place in (path, *path.parents):
        with suppress(OSError):  # a name that is too long
            if place.exists():
                return place
    return Path("/")


def unwritable(folder: Path) -> str | None:
    """Why `folder` could not be made, or nothing be written in it; None if it could. Leaves nothing behind."""
    try:
        limit = os.pathconf(find_existing(folder), "PC_NAME_MAX")
        names = [part for part in folder.parts if len(os.fsencode(part)) + ASIDE_CHARS > limit]
        if names or len(os.fsencode(folder)) + 2 * ASIDE_CHARS > os.pathconf("/", "PC_PATH_MAX"):
            return os.strerror(errno.ENAMETOOLONG)
        with tempfile.TemporaryFile(dir=find_existing(folder)) as probe:
            probe.write(bytes(PROBE_BYTES))
    except OSError as error:
        return disk_reason(error, find_existing(folder))
    return None


@contextmanager
def file_aside(path: Path, durable: bool = True) -> Iterator[Path]:
    """A temporary file that becomes `path` when it is whole; gone on an error.

    `durable`: it is on the disk first, so that a crash of the machine leaves the old file or the new one.
    """
    with name_disk_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        aside = path.parent / f".{path.name}.new.{secrets.token_hex(4)}"
        try:
            aside.touch()
            mode = aside.stat().st_mode
            yield aside
            aside.chmod(mode)  # some libraries make files that nobody else may read
            if durable:
                flush(aside)
            aside.replace(path)
            if durable:
                flush(path.parent)
        finally:
            aside.unlink(missing_ok=True)


def write_text(path: Path, text: str, durable: bool = True) -> None:
    """Replace a file, so that a reader sees all of it or nothing; `durable` as for `file_aside`."""
    with file_aside(path, durable) as aside:
        aside.write_text(text, encoding="utf-8")


def write_json(path: Path, value: Any, durable: bool = True) -> None:
    """Replace a file of JSON, so that a reader sees all of it or nothing; `durable` as for `file_aside`."""
    write_text(path, json.dumps(value, indent=1) + "\n", durable)


@contextmanager
def write_aside(path: Path, keep: bool = False) -> Iterator[Path]:
    """A temporary folder that becomes `path` when everything in it is on the disk; gone on an error.

    What is at `path` already is never replaced. With `keep` it is taken for the same (another process made it
    meanwhile), and the new folder goes.

    Raises:
        DiskError: something is there, and `keep` is false.
    """
    with name_disk_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        aside = path.parent / f".{path.name}.new.{secrets.token_hex(4)}"
        aside.mkdir()
        try:
            yield aside
            settle(aside)
            try:
                aside.rename(path)
            except OSError as error:
                if not keep or error.errno not in TAKEN:
                    raise
            flush(path.parent)
        finally:
            shutil.rmtree(aside, ignore_errors=True)


def settle(folder: Path) -> None:
    """Give every file below a new folder the rights that the process's umask gave the folder, and have all on disk."""
    mode = folder.stat().st_mode & 0o666
    for path in (*folder.rglob("*"), folder):
        if path.is_file():
            path.chmod(mode)
        flush(path)


def put(source: Path, target: Path) -> Path:
    """Rename a file or folder to `target`, or to `target-1`, `target-2`, ... where that is taken; returns its place.

    Nothing is ever overwritten but an empty folder.
    """
    for number in itertools.count():
        stem, suffix = (target.name, "") if source.is_dir() else (target.stem, target.suffix)
        place = target.with_name(f"{stem}-{number}{suffix}") if number else target
        try:
            rename_new(source, place)
        except OSError as error:
            if error.errno not in TAKEN:
                raise
            continue
        flush(place.parent)
        return place
    raise AssertionError("unreachable: the count has no end")


def rename_new(source: Path, place: Path) -> None:
    """Rename a file or folder to a place where nothing is but perhaps an empty folder, or fail."""
    if source.is_dir():
        source.rename(place)  # refuses a folder that holds something
        return
    try:
        os.link(source, place)  # refuses any file
    except OSError as error:
        if error.errno in TAKEN:
            raise
        if place.exists():
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(place)) from None
        source.rename(place)  # this file system has no links
    else:
        source.unlink()


def sweep_abandoned(folder: Path) -> None:
    """Remove what killed runs began to write aside in `folder`."""
    for begun in folder.glob(".*.new.*"):
        with suppress(OSError):  # another run removes it at the same time
            changed = max(path.lstat().st_mtime for path in (begun, *begun.glob("*")))
            if time.time() - changed > ABANDONED_S:
                shutil.rmtree(begun) if begun.is_dir() else begun.unlink()


def modified_at(path: Path) -> float:
    """Return when a file or folder was changed last, in seconds since the epoch; 0 if another process has removed or
    renamed it meanwhile."""
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0


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
