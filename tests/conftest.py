"""Ranks that several test modules share, and which tests stay in one process when there are several."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from ranks import Ranks


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """A module's tests stay together, for its fixtures; so do all of e2e, whose runs are shared by its modules."""
    for item in items:
        item.add_marker(pytest.mark.xdist_group("e2e" if "e2e" in item.path.parts else item.path.stem))


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
