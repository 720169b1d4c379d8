"""Ranks that several test modules share."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

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
