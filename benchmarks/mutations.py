"""Makes each mistake that a test is marked with in a copy of the sources, and runs that test:
`python benchmarks/mutations.py` writes docs/mutations.md; with words, only the mutations whose titles have one of them,
beside the rows that the page has.

    @pytest.mark.notices("the reward is a penalty", "algo/advantage.py", "rewards = +", "rewards = -", cases="gae")

A mark has a title, a file below src/rlhf_suite, a text that stands in it once, and what it becomes. `cases` chooses
cases of a parametrised test in pytest's words (-k); `limit_s` is how long the test may take with the mistake. Marks are
read from the sources of the tests, without an import.

Every run is forked from one of `--jobs` processes, which are forked from this one, so that the heavy imports are paid
once: the ranks that tests ask for are in it, too, unless there are several of them. A run that is not over in time is
killed with all processes that it started: then the mistake is noticed by the time-out. Nothing that a run started
outlives it.
"""

from __future__ import annotations

import argparse
import ast
import ctypes
import os
import re
import resource
import select
import shutil
import signal
import socket
import subprocess
import sys
import traceback
from collections import defaultdict
from collections.abc import Callable, Iterator
from compileall import compile_dir
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import suppress
from dataclasses import dataclass
from importlib import import_module
from multiprocessing import get_context
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NoReturn

import psutil
import pytest

ROOT = Path(__file__).resolve().parents[1]
TESTS = ROOT / "tests"
PAGE = ROOT / "docs" / "mutations.md"
PACKAGE = Path("src/rlhf_suite")
MEMORY = 12 * 2**30
LIMIT_S = 120  # of a test with a mistake
PASS_S = 600  # of a test without one
ADOPT_ORPHANS = 36  # PR_SET_CHILD_SUBREAPER of prctl(2)
HEAVY = ("deepspeed", "fastapi", "httpx", "hydra", "pyarrow.parquet", "ray", "rich.table", "transformers.models.qwen3")
HEAD = """# Mistakes that the tests notice

`python benchmarks/mutations.py` writes this page from the marks `notices` of the tests. Each mistake is made by itself,
in a copy of the sources. Without it the same test passes. The last column has the test that failed, or SURVIVED;
`time-out` or a signal stands after a test that did not come to its end.

| mistake | file | edit | noticed by |
|---|---|---|---|
"""


@dataclass(frozen=True)
class Mutation:
    """A mistake: `before` becomes `after` in `file` (below src/rlhf_suite), and `test` must fail in one of `cases`, or
    take longer than `limit_s`."""

    test: str
    title: str
    file: str
    before: str
    after: str
    cases: str = ""
    limit_s: int = LIMIT_S


def mutations() -> list[Mutation]:
    """Return the mutations that the tests are marked with, by their files."""
    files = [path for path in sorted(TESTS.rglob("test_*.py")) if "mark.notices(" in path.read_text()]
    return sorted((mutation for path in files for mutation in marks(path)), key=lambda mutation: mutation.file)


def marks(path: Path) -> Iterator[Mutation]:
    """Yield the mutations that the tests of a file are marked with."""
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        for mark in getattr(node, "decorator_list", ()):
            if isinstance(mark, ast.Call) and ast.unparse(mark.func) == "pytest.mark.notices":
                words = [ast.literal_eval(word) for word in mark.args]
                named = {str(word.arg): ast.literal_eval(word.value) for word in mark.keywords}
                yield Mutation(f"{path.relative_to(ROOT)}::{node.name}", *words, **named)


def main() -> None:
    """Write the table; exit 1 if a mistake went unnoticed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("words", nargs="*")
    parser.add_argument("--quick", action="store_true", help="take it that the tests pass without mutations")
    parser.add_argument("--missing", action="store_true", help="only those that the page does not have yet")
    parser.add_argument("--page", action="store_true", help="make none, and write the rows that are known")
    parser.add_argument("--jobs", type=int, default=2, help="how many are made at a time")
    arguments = parser.parse_args()
    marked = mutations()
    known = known_rows(marked)
    chosen = [m for m in marked if not arguments.words or any(word in m.title for word in arguments.words)]
    chosen = [m for m in chosen if not arguments.page and not (arguments.missing and m.title in known)]
    write_page(marked, known)
    if chosen:
        load_environment()
    with TemporaryDirectory(prefix="mutations-") as folder:
        if not arguments.quick:
            must_pass(Path(folder) / "unchanged", chosen)
        for mutation, verdict in verdicts(chosen, arguments.jobs, Path(folder)):
            known[mutation.title] = f"{begin(mutation)}{verdict} |"
            print(known[mutation.title], flush=True)
            write_page(marked, known)
    sys.exit(any("SURVIVED" in row for row in known.values()))


def load_environment() -> None:
    """Import what tests import, once for all of them."""
    os.environ |= {"DS_ACCELERATOR": "cpu", "CUDA_VISIBLE_DEVICES": "", "PYTHONWARNINGS": "ignore"}
    compile_dir(ROOT / PACKAGE, quiet=1)  # copies have the byte code, too, which a process takes seconds to make
    for name in HEAVY:
        import_module(name)


def write_page(marked: list[Mutation], known: dict[str, str]) -> None:
    """Write the rows that there are, by title, in the order of the mutations, and the titles of the others."""
    rows = [known[mutation.title] for mutation in marked if mutation.title in known]
    missing = [mutation.title for mutation in marked if mutation.title not in known]
    note = f"\nNot made yet: {'; '.join(missing)}.\n" if missing else ""
    PAGE.write_text(HEAD + "\n".join(rows) + "\n" + note)


def begin(mutation: Mutation) -> str:
    """A row but for its last column."""
    before, after = (" ".join(text.split()).replace("|", "\\|") for text in (mutation.before, mutation.after))
    return f"| {mutation.title} | `{mutation.file}` | `{before}` -> `{after}` | "


def known_rows(marked: list[Mutation]) -> dict[str, str]:
    """The rows of the page, by title, whose mutation and test are still the same."""
    lines = {line.split(" | ")[0][2:]: line for line in PAGE.read_text().splitlines() if line.startswith("| ")}
    rows = {mutation: lines.get(mutation.title, "") for mutation in marked}
    return {m.title: row for m, row in rows.items() if row.startswith((begin(m) + f"`{m.test}", begin(m) + "SURVIVED"))}


def copy_of_sources(folder: Path) -> Path:
    for name in ("src", "conf"):
        shutil.copytree(ROOT / name, folder / name)
    return folder


def must_pass(folder: Path, mutations: list[Mutation]) -> None:
    """A test that fails anyway would notice nothing."""
    copy_of_sources(folder)
    together: dict[tuple[str, str], set[str]] = defaultdict(set)
    for mutation in mutations:
        together[mutation.test.partition("::")[0], mutation.cases].add(mutation.test)
    for (_, cases), tests in together.items():
        if failed := first_failure(folder, sorted(tests), cases, PASS_S * len(tests)):
            said = (folder / "log").read_text()
            raise SystemExit(f"{failed} fails without any mutation:\n{said[-4000:]}")


def verdicts(chosen: list[Mutation], jobs: int, folder: Path) -> Iterator[tuple[Mutation, str]]:
    """Yield each mutation and how it is noticed, in the order in which they end."""
    with ProcessPoolExecutor(jobs, mp_context=get_context("fork")) as pool:
        made = {pool.submit(noticed_by, folder, mutation): mutation for mutation in chosen}
        try:
            for run in as_completed(made):
                yield made[run], run.result()
        finally:
            pool.shutdown(cancel_futures=True)


def noticed_by(folder: Path, mutation: Mutation) -> str:
    """Return how the mutation is noticed: by the first test that fails with it, or SURVIVED."""
    place = folder / str(os.getpid())
    remove(place)
    apply(mutation, copy_of_sources(place))
    verdict = first_failure(place, [mutation.test], mutation.cases, mutation.limit_s)
    remove(place)
    return verdict or "SURVIVED"


def remove(place: Path) -> None:
    """Remove what a run has left. Its folders may be in one another deeper than Python can go."""
    subprocess.run(["rm", "-rf", place], check=True)


def apply(mutation: Mutation, place: Path) -> None:
    """Edit the copy below `place`."""
    path = place / PACKAGE / mutation.file
    text = path.read_text()
    if text.count(mutation.before) != 1:
        raise SystemExit(f"{mutation.title}: {mutation.file} has not exactly one {mutation.before!r}; mend the mark")
    path.write_text(text.replace(mutation.before, mutation.after))


def first_failure(place: Path, tests: list[str], cases: str, limit_s: float) -> str:
    """Return the first of `tests`, or of their cases, that fails with the sources in `place`, and how, if it does not
    come to its end; "" if all pass."""
    log = place / "log"
    adopt_orphans()
    pid = os.fork()
    if pid == 0:
        run_tests(place, log, tests, cases)
    try:
        code = exit_code(pid, limit_s)
    finally:
        end_children()
    if code == 0:
        return ""
    if code is None:
        return f"`{' '.join(tests)}` (time-out: {limit_s:g} s)"
    if code < 0:
        return f"`{' '.join(tests)}` ({signal.Signals(-code).name})"
    said = log.read_text(errors="replace")
    failed = re.search(r"^(?:FAILED|ERROR) (\S.*?)(?: - .*)?$", said, re.MULTILINE)
    if not failed:
        raise SystemExit(f"pytest {' '.join(tests)} ended with {code}:\n{said[-4000:]}")
    return f"`{failed[1]}`"


def run_tests(place: Path, log: Path, tests: list[str], cases: str) -> NoReturn:
    """Be the process of a run: its output goes to `log`, and its exit code is that of pytest."""
    sys.path[:0] = [str(place / "src"), str(ROOT)]
    os.environ |= {"PYTHONPATH": str(place / "src"), "PYTHONDONTWRITEBYTECODE": "1"}
    os.chdir(ROOT)
    with log.open("w", encoding="utf-8") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    resource.setrlimit(resource.RLIMIT_DATA, (MEMORY, MEMORY))  # what grows without end fails its test
    keep_single_ranks_here()
    # To rewrite the assertions of all tests and helpers takes longer than most tests; nobody reads what they say.
    words = ["-x", "-rfE", "--assert=plain", "-k", cases, f"--basetemp={place / 'tmp'}", *tests]
    code = 1
    try:
        code = pytest.main(words)
        sys.stdout.flush()
    except BaseException:
        traceback.print_exc()
    finally:  # this process has the code of its parent on its stack
        os._exit(code)


def exit_code(pid: int, limit_s: float) -> int | None:
    """Wait for a child of this process and return its exit code; None if it has not ended in time."""
    handle = os.pidfd_open(pid)
    try:
        is_over, _, _ = select.select([handle], [], [], limit_s)
    finally:
        os.close(handle)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) if is_over else None


def adopt_orphans() -> None:
    """Become the parent of all processes whose parents end, so that `end_children` knows them."""
    ctypes.CDLL(None).prctl(ADOPT_ORPHANS, 1)


def end_children() -> None:
    """Kill all processes that this one has started, those of other process groups and sessions too."""
    while children := psutil.Process().children(recursive=True):
        for child in children:
            with suppress(psutil.NoSuchProcess):
                child.kill()
        psutil.wait_procs(children, 1.0)


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
    main()
