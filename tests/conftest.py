"""Ranks that several test modules share."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from full_disk import small_disk
from ranks import Ranks


@pytest.fixture(scope="session")
def ranks() -> Iterator[Callable[[int], Ranks]]:
    """`ranks(n)`: n processes that train together; started once, and again after a test that broke them."""
    groups: dict[int, Ranks] = {}

    def get(size: int) -> Ranks:
        if size not in groups or not groups[size].alive:
            groups[size] = Ranks(size)
        return groups[size]

    yield get
    for group in groups.values():
        group.close()


@pytest.fixture
def small(tmp_path: Path) -> Iterator[Path]:
    """A file system of 64 KB that belongs to this test."""
    with small_disk(tmp_path / "disk", 64) as folder:
        yield folder
