"""Makes each mistake of `mutation_list.py` in a copy of the sources and runs the tests that are to notice it:
`python benchmarks/mutations.py` writes docs/mutations.md; with words, only the mutations whose names have one of them,
beside the rows that the page has.

Every run is forked from this process, so that the heavy imports are paid once: the ranks that tests ask for are in it,
too, unless there are several of them.
"""

from __future__ import annotations

import argparse
import os
import re
import resource
import shutil
import signal
import socket
import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest

from mutation import Mutation
from mutation_list import MUTATIONS

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "mutations.md"
PACKAGE = Path("src/rlhf_suite")
MEMORY = 12 * 2**30
LIMIT_S = 600
HEAVY = ("deepspeed", "fastapi", "httpx", "hydra", "pyarrow.parquet", "ray", "rich.table", "transformers.models.qwen3")
HEAD = """# Mistakes that the tests notice

`python benchmarks/mutations.py` writes this page. Each mistake is made by itself, in a copy of the sources. Without the
mistake the same tests pass. The last column is the first test that failed, or SURVIVED.

| mistake | file | edit | noticed by |
|---|---|---|---|
"""


def main() -> None:
    """Write the table; exit 1 if a mistake went unnoticed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("words", nargs="*")
    parser.add_argument("--quick", action="store_true", help="take it that the tests pass without mutations")
    parser.add_argument("--missing", action="store_true", help="only those that the page does not have yet")
    arguments = parser.parse_args()
    chosen = [m for m in MUTATIONS if not arguments.words or any(word in m.name for word in arguments.words)]
    known = known_rows()
    chosen = [m for m in chosen if not arguments.missing or m.name not in known]
    with TemporaryDirectory(prefix="rlhf-suite-mutations-") as folder:
        if not arguments.quick:
            must_pass(Path(folder) / "unchanged", chosen)
        for mutation in chosen:
            known[mutation.name] = f"{begin(mutation)}{noticed_by(Path(folder) / 'mutated', mutation)} |"
            print(known[mutation.name], flush=True)
            write_page(known)
    sys.exit(any("SURVIVED" in row for row in known.values()))


def write_page(known: dict[str, str]) -> None:
    """Write the rows that there are, by mutation, in the order of the lists, and the names of the others."""
    rows = [known[mutation.name] for mutation in MUTATIONS if mutation.name in known]
    missing = [mutation.name for mutation in MUTATIONS if mutation.name not in known]
    note = f"\nNot made yet: {'; '.join(missing)}.\n" if missing else ""
    PAGE.write_text(HEAD + "\n".join(rows) + "\n" + note)


def begin(mutation: Mutation) -> str:
    """A row but for its last column."""
    before, after = (" ".join(text.split()).replace("|", "\\|") for text in (mutation.before, mutation.after))
    return f"| {mutation.name} | `{mutation.file}` | `{before}` -> `{after}` | "


def known_rows() -> dict[str, str]:
    """The rows of the page whose mutation is still the same."""
    lines = PAGE.read_text().splitlines() if PAGE.exists() else []
    return {m.name: line for m in MUTATIONS for line in lines if line.startswith(begin(m))}


def copy_of_sources(folder: Path) -> Path:
    for name in ("src", "conf"):
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    return folder


def must_pass(folder: Path, mutations: list[Mutation]) -> None:
    """A test that fails anyway would notice nothing."""
    copy_of_sources(folder)
    for tests in sorted({mutation.tests for mutation in mutations}):
        if failed := first_failure(folder, tests):
            said = (folder / "log").read_text()
            raise SystemExit(f"{failed} fails without any mutation:\n{said[-4000:]}")


def noticed_by(place: Path, mutation: Mutation) -> str:
    """The first test that fails with the mutation."""
    apply(mutation, copy_of_sources(place))
    found = first_failure(place, mutation.tests)
    shutil.rmtree(place)
    return f"`{found}`" if found else "SURVIVED"


def apply(mutation: Mutation, place: Path) -> None:
    """Edit the copy below `place`."""
    path = place / PACKAGE / mutation.file
    text = path.read_text()
    if text.count(mutation.before) != 1:
        raise SystemExit(f"{mutation.name}: {mutation.file} has not exactly one {mutation.before!r}; mend the mutation")
    path.write_text(text.replace(mutation.before, mutation.after))


def first_failure(place: Path, tests: tuple[str, ...]) -> str | None:
    """The first of `tests` that fails with the sources in `place`."""
    log = place / "log"
    pid = os.fork()
    if pid == 0:
        sys.path[:0] = [str(place / "src"), str(ROOT)]
        os.environ |= {"PYTHONPATH": str(place / "src"), "PYTHONDONTWRITEBYTECODE": "1"}
        os.chdir(ROOT)
        with log.open("w") as file:
            os.dup2(file.fileno(), 1)
            os.dup2(file.fileno(), 2)
        resource.setrlimit(resource.RLIMIT_DATA, (MEMORY, MEMORY))  # what grows without end fails its test,
        signal.signal(signal.SIGALRM, end_test)  # and so does what hangs
        signal.alarm(LIMIT_S)
        keep_single_ranks_here()
        code = pytest.main(["-x", "-rfE", *tests])
        sys.stdout.flush()
        os._exit(code)
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    if code == 0:
        return None
    said = log.read_text()
    found = re.search(r"^(?:FAILED|ERROR) (\S.*?)(?: - .*)?$", said, re.MULTILINE)
    if not found:
        raise SystemExit(f"pytest {' '.join(tests)} ended with {code}:\n{said[-4000:]}")
    return found[1]


def end_test(*_: object) -> None:
    """End the test that runs when the time is up."""
    raise TimeoutError(f"the tests of a mutation did not end within {LIMIT_S} s")


def keep_single_ranks_here() -> None:
    """Have the tests' `ranks(1)` be this process, which has imported everything, instead of one that has to."""
    sys.path.insert(0, str(ROOT / "tests"))
    import ranks

    several = ranks.Ranks
    ranks.Ranks = lambda size: Here() if size == 1 else several(size)


class Here:
    """One rank in this process, asked as `tests/ranks.py` asks processes of their own."""

    size, alive = 1, True

    def __init__(self) -> None:
        from rlhf_suite.launch.environment import runtime_env

        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        os.environ.update(runtime_env("cpu") | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)})
        os.environ.update(RANK="0", WORLD_SIZE="1", LOCAL_RANK="0", LOCAL_WORLD_SIZE="1")
        import torch

        from rlhf_suite.distributed.mesh import Mesh, Rank
        from rlhf_suite.train.strategy import join_world

        torch.set_num_threads(1)
        self.world = join_world(Rank(0, Mesh(1), "127.0.0.1", port, "cpu"))

    def call(self, function: Callable[..., Any], *args: Any) -> list[Any]:
        return [function(self.world, *args)]

    def close(self) -> None:
        """Nothing is held: the process ends after its tests."""


if __name__ == "__main__":
    os.environ |= {"DS_ACCELERATOR": "cpu", "CUDA_VISIBLE_DEVICES": "", "PYTHONWARNINGS": "ignore"}
    for name in HEAVY:
        import_module(name)
    main()
