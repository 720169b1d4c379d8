"""The tier of every test, and the fixtures that several folders share.

A test has one tier: `quick` (pure functions and configuration), `stack` (starts processes, Ray, vLLM or gloo), `e2e`
(whole jobs) or `proof` (matrices and long versions, run on demand). A marker at the test or its file decides, then the
fixtures that the test uses, then its folder; what is left is quick. `pytest -m quick` runs one tier.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from full_disk import small_disk
from ranks import Ranks

# Several processes of tests share the cores; threads that wait for each other in a loop take most of their time.
os.environ.setdefault("OMP_NUM_THREADS", "1")
TIERS = ("proof", "e2e", "stack", "quick")  # what takes longest runs first
FIXTURE_TIERS = {"ranks": "stack", "cluster": "stack", "small": "stack"}
FOLDER_TIERS = {
    **dict.fromkeys(("distributed", "engines", "golden", "launch", "sandbox", "serving", "weight_sync"), "stack"),
    "e2e": "e2e",
}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark every test with its tier, and begin with the files whose tests take longest."""
    first: dict[Path, int] = {}
    for item in items:
        if not tiers(item):
            item.add_marker(default_tier(item))
        first[item.path] = min(TIERS.index(tiers(item)[0]), first.get(item.path, len(TIERS)))
    items.sort(key=lambda item: first[item.path])


def tiers(item: pytest.Item) -> list[str]:
    """Return the tiers that a test is marked with, those of the test itself before those of its file."""
    return [mark.name for mark in item.iter_markers() if mark.name in TIERS]


def default_tier(item: pytest.Item) -> str:
    """Return the tier of a test without a marker."""
    folder = item.path.relative_to(Path(__file__).parent).parts[0]
    by_fixture = (tier for name, tier in FIXTURE_TIERS.items() if name in getattr(item, "fixturenames", ()))
    return FOLDER_TIERS.get(folder) or next(by_fixture, "quick")


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
