"""Which sets of encoded rows stay on the disk: those in use, and of the others the latest used, up to a bound.

Whoever reads a set holds a shared lock on one of its files for as long as it is open, in whatever process and on
whatever node; the lock goes with the process. A set is removed under an exclusive lock alone, and is renamed first, so
that who opens it at that moment finds all of it or nothing. Where the file system has no locks nothing is removed.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
from pathlib import Path
from typing import IO

from rlhf_suite.locks import lock


def in_use(file: Path) -> IO[bytes]:
    """Open `file` of a set and hold the set for as long as the result lives; the time of its last use is now.

    Raises:
        OSError: it is not there, or is just being removed.
    """
    held = file.open("rb")
    try:
        if not lock(held, shared=True):
            raise FileNotFoundError(file)
        if not os.path.samestat(os.fstat(held.fileno()), file.stat()):
            raise FileNotFoundError(file)
        with contextlib.suppress(PermissionError):  # a cache of somebody else's
            os.utime(file)
    except BaseException:
        held.close()
        raise
    return held


def make_room(cache: Path, mark: str, max_bytes: float) -> list[Path]:
    """Remove sets, folders of `cache`, until they have `max_bytes` together or all that are left are in use; the one
    whose file `mark` was touched longest ago goes first. Returns what is gone."""
    sets = [folder for folder in cache.glob("[!.]*") if (folder / mark).is_file()]
    sizes = {folder: sum(file.stat().st_size for file in folder.iterdir()) for folder in sets}
    total, gone = sum(sizes.values()), list[Path]()
    for folder in sorted(sets, key=lambda each: (each / mark).stat().st_mtime):
        if total <= max_bytes:
            break
        if removed(folder, mark):
            gone.append(folder)
            total -= sizes[folder]
    return gone


def removed(folder: Path, mark: str) -> bool:
    """Remove a set unless somebody has it open."""
    aside = folder.with_name(f".{folder.name}.old.{os.getpid()}")
    try:
        with (folder / mark).open("r+b") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            folder.rename(aside)
    except OSError:  # it is in use, another process removes it, or it is not ours
        return False
    shutil.rmtree(aside, ignore_errors=True)
    return True
