"""The files of a checkpoint and their digests.

A file is digested by who writes it, while it is written, and by who reads it, before anything of it is used. So each
rank of a model digests its own part, all of them at the same time.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO, NamedTuple

from rlhf_suite.disk import file_digest
from rlhf_suite.distributed.mesh import Mesh

THREADS = 8  # hashlib computes outside of Python's lock
OF_A_RANK = re.compile(r"(?:_tensor(\d+))?_(\d+)\.pt$")  # ends the name of a file that a rank wrote


class Entry(NamedTuple):
    """Size and digest of a file, as the manifest of a checkpoint has them."""

    bytes: int
    sha256: str


Entries = dict[str, Entry]  # by the name of the file


class DigestedFile:
    """A file that is written from its start to its end, and digested on the way."""

    def __init__(self, file: BinaryIO) -> None:
        self.file, self.sha256, self.size = file, hashlib.sha256(), 0
        self.error: OSError | None = None  # of the disk: libraries raise others in its place

    def write(self, data: bytes | memoryview) -> int:
        """Write all of `data` and return its number of bytes."""
        try:
            self.file.write(data)
        except OSError as error:
            self.error = self.error or error
            raise
        self.sha256.update(data)
        self.size += len(data)
        return len(data)

    def flush(self) -> None:
        self.file.flush()

    @property
    def entry(self) -> Entry:
        """Return what the manifest says of the file as far as it is written."""
        return Entry(self.size, self.sha256.hexdigest())


@contextmanager
def digest_new_file(path: Path) -> Iterator[DigestedFile]:
    """Open a new file for writing, and have it on the disk after the block."""
    with path.open("wb") as file:
        writer = DigestedFile(file)
        try:
            yield writer
        except Exception:
            if writer.error is not None:
                raise writer.error from None
            raise
        file.flush()
        os.fsync(file.fileno())


def file_digests(folder: Path, names: Iterable[str]) -> dict[str, str]:
    """Return the SHA-256 of the files of a folder that can be read, computed by several threads."""
    listed = list(names)

    def digest(name: str) -> str | None:
        try:
            return file_digest(folder / name)
        except OSError:
            return None

    with ThreadPoolExecutor(THREADS) as pool:  # no-limit: it reads files, which end
        read = dict(zip(listed, pool.map(digest, listed), strict=True))
    return {name: sha256 for name, sha256 in read.items() if sha256 is not None}


def share(names: Sequence[str], rank: int, mesh: Mesh) -> list[str]:
    """Return the files of a checkpoint that a rank digests: those with the parts that it holds itself, if as many ranks
    wrote them, and its share of all others. Every file is that of one rank."""
    return [name for place, name in enumerate(names) if reader(name, place, mesh) == rank]


def reader(name: str, place: int, mesh: Mesh) -> int:
    """Return the rank that digests a file, by its name or, where that has no number, by its place among all."""
    match = OF_A_RANK.search(name)
    number = place if match is None else int(match[2]) * mesh.tensor + int(match[1] or 0)
    return number % mesh.size
