"""A small disk of its own for a test, and how it is filled."""

from __future__ import annotations

import errno
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest


@contextmanager
def small_disk(folder: Path, kilobytes: int) -> Iterator[Path]:
    """Mount a file system of this size at `folder`; the test is skipped where that is not permitted."""
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", f"size={kilobytes}k", "tmpfs", str(folder)]
    if subprocess.run(command, capture_output=True, check=False).returncode:
        pytest.skip("mounting a small disk is not permitted here")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


def fill(folder: Path) -> None:
    """Write until nothing more fits."""
    with (folder / "filler").open("ab", buffering=0) as file:
        for size in (4096, 1):
            try:
                while file.write(bytes(size)) == size:
                    pass
            except OSError as error:
                assert error.errno == errno.ENOSPC


def make_read_only(folder: Path) -> None:
    """Have the small disk at `folder` refuse each write from now on."""
    subprocess.run(["mount", "-o", "remount,ro", str(folder)], check=True)
