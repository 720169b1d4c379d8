"""The tier of every test, and the fixtures that several folders share.

A test has one tier: `quick` (pure functions and single configurations; a minute for all of them), `stack` (starts
processes, Ray, vLLM or gloo, loads models, or composes dozens of configurations), `e2e` (whole jobs) or `proof`
(matrices and long versions, run on demand). A marker at the test or its file decides, then the fixtures that the test
uses, then its folder; what is left is quick. `pytest -m quick` runs one tier.
"""

from __future__ import annotations

import asyncio
import atexit
import gc
import os
import re
import signal
import sys
from collections.abc import Callable, Iterator
from functools import cache
from importlib.util import find_spec
from pathlib import Path

import pytest

from attack_page import Section
from clock import Clock
from full_disk import small_disk
from ranks import Ranks

# Several processes of tests share the cores; threads that wait for each other in a loop take most of their time.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# Below nohup, or in the background of a script, these signals are ignored, also by what tests start. A function that
# does nothing is not inherited.
for number in (signal.SIGHUP, signal.SIGINT):
    if signal.getsignal(number) is signal.SIG_IGN:
        signal.signal(number, lambda *_: None)
TIERS = ("proof", "e2e", "stack", "quick")  # what takes longest runs first
FIXTURE_TIERS = {"ranks": "stack", "cluster": "stack", "small": "stack"}
FOLDER_TIERS = {
    **dict.fromkeys(
        ("distributed", "engines", "golden", "launch", "models", "sandbox", "serving", "weight_sync"), "stack"
    ),
    "e2e": "e2e",
}

OTHER_TIER = re.compile(r"^pytestmark = pytest\.mark\.(?!quick)(\w+)", re.MULTILINE)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--pages", action="store_true", help="write what attacks came to into docs/reward_attacks.md")


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leave out files without a quick test where these alone are asked for: to import them takes long."""
    if config.getoption("markexpr") != "quick" or not collection_path.name.startswith("test_"):
        return None
    content = collection_path.read_text()
    tier = FOLDER_TIERS.get(folder_of(collection_path)) or OTHER_TIER.search(content)
    return True if tier and "mark.quick" not in content else None


def pytest_collection_finish() -> None:
    """Keep what was imported and collected out of every later search for garbage: all of it stays to the end."""
    gc.collect()
    gc.freeze()
    atexit.register(gc.unfreeze)  # extensions count what is left at the end


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark every test with its tier, and begin with the files whose tests take longest. Where one tier is asked for,
    leave out the tests of others: a file's marker is not that of each of its tests. Skip what needs a GPU or vLLM
    where there is none."""
    first: dict[Path, int] = {}
    for item in items:
        if not tiers(item):
            item.add_marker(default_tier(item))
        first[item.path] = min(TIERS.index(tiers(item)[0]), first.get(item.path, len(TIERS)))
    items.sort(key=lambda item: first[item.path])
    if (wanted := config.getoption("markexpr")) in TIERS:
        items[:] = [item for item in items if tiers(item)[0] == wanted]
    for item in items:
        if item.get_closest_marker("gpu") and not has_gpu():
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
        if item.get_closest_marker("vllm") and find_spec("vllm") is None:
            item.add_marker(pytest.mark.skip(reason="needs vLLM: pip install 'rlhf-suite[cpu]'"))


@cache
def has_gpu() -> bool:
    import torch

    return torch.cuda.is_available()


def tiers(item: pytest.Item) -> list[str]:
    """Return the tiers that a test is marked with, those of the test itself before those of its file."""
    return [mark.name for mark in item.iter_markers() if mark.name in TIERS]


def default_tier(item: pytest.Item) -> str:
    """Return the tier of a test without a marker."""
    by_fixture = (tier for name, tier in FIXTURE_TIERS.items() if name in getattr(item, "fixturenames", ()))
    return FOLDER_TIERS.get(folder_of(item.path)) or next(by_fixture, "quick")


def folder_of(file: Path) -> str:
    """Return the folder of tests/ that a file is in, or its name."""
    return file.relative_to(Path(__file__).parent).parts[0]


@pytest.fixture(scope="session")
def ranks() -> Iterator[Callable[..., Ranks]]:
    """`ranks(n)`: n processes that train together; started once, and again after a test that broke them. DeepSpeed
    keeps the number of ranks that split matrices (`tensor`) for the life of a process."""
    groups: dict[tuple[int, int], Ranks] = {}

    def get(size: int, tensor: int = 1) -> Ranks:
        if (size, tensor) not in groups or not groups[size, tensor].alive:
            groups[size, tensor] = Ranks(size)
        return groups[size, tensor]

    yield get
    for group in groups.values():
        group.close()


@pytest.fixture(scope="module")
def section(request: pytest.FixtureRequest) -> Iterator[Section]:
    """The section of docs/reward_attacks.md that the tests of a file fill; it is written if `--pages` asks for it."""
    yield request.module.SECTION
    if request.config.getoption("--pages"):
        request.module.SECTION.write()


@pytest.fixture(autouse=True)
def own_layers(request: pytest.FixtureRequest) -> Iterator[None]:
    """After a test on a GPU, put back the functions of transformers: Liger's kernels replace some for the process, and
    compute nothing on the CPU."""
    if request.node.get_closest_marker("gpu") is None:
        yield
        return
    modules = [module for name, module in sys.modules.items() if ".modeling_" in name]
    before = [(module, dict(vars(module))) for module in modules]
    yield
    for module, functions in before:
        vars(module).update(functions)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """The clock of the event loops, which this test may put forward."""
    clock = Clock()

    def now(loop: asyncio.AbstractEventLoop) -> float:  # a bound method would not get the loop
        return clock.time(loop)

    monkeypatch.setattr(asyncio.BaseEventLoop, "time", now)
    return clock


@pytest.fixture
def small(tmp_path: Path) -> Iterator[Path]:
    """A file system of 64 KB that belongs to this test."""
    with small_disk(tmp_path / "disk", 64) as folder:
        yield folder
