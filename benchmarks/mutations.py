"""Makes each mistake of `mutation_list.py` in a copy of the sources and runs the tests that are to notice it:
`python benchmarks/mutations.py` writes docs/mutations.md; with words, only the mutations whose names have one of them.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

from mutation_list import MUTATIONS, Mutation

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "mutations.md"
PACKAGE = Path("src/rlhf_suite")
DEADLINE_S = 900
HEAD = """# Mistakes that the tests notice

`python benchmarks/mutations.py` writes this page. Each mistake is made alone, in a copy of the sources; the same tests
pass without it. The last column is the first test that failed, or SURVIVED.

| mistake | file | edit | noticed by |
|---|---|---|---|
"""


def main() -> None:
    """Write the table; exit 1 if a mistake went unnoticed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("words", nargs="*")
    parser.add_argument("--quick", action="store_true", help="take it that the tests pass without mutations")
    parser.add_argument("--jobs", type=int, default=1, help="mutations at a time")
    arguments = parser.parse_args()
    chosen = [m for m in MUTATIONS if not arguments.words or any(word in m.name for word in arguments.words)]
    with TemporaryDirectory(prefix="rlhf-suite-mutations-") as folder, ThreadPoolExecutor(arguments.jobs) as pool:
        if not arguments.quick:
            must_pass(Path(folder) / "unchanged", chosen, pool)
        rows = []
        for mutation, test in zip(chosen, pool.map(partial(noticed_by, Path(folder)), chosen), strict=True):
            rows.append(f"| {mutation.name} | `{mutation.file}` | {edit(mutation)} | {test} |")
            print(rows[-1], flush=True)
    if not arguments.words:
        PAGE.write_text(HEAD + "\n".join(rows) + "\n")
    sys.exit(any("SURVIVED" in row for row in rows))


def copy_of_sources(folder: Path) -> Path:
    for name in ("src", "conf"):
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    return folder


def must_pass(folder: Path, mutations: list[Mutation], pool: ThreadPoolExecutor) -> None:
    """A test that fails anyway would notice nothing."""
    copy_of_sources(folder)
    tests = sorted({mutation.tests for mutation in mutations})
    for failed in filter(None, pool.map(partial(first_failure, folder), tests)):
        raise SystemExit(f"{failed} fails without any mutation")


def noticed_by(folder: Path, mutation: Mutation) -> str:
    """The first test that fails with the mutation."""
    place = copy_of_sources(folder / str(MUTATIONS.index(mutation)))
    apply(mutation, place)
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
    environment = os.environ | {"PYTHONPATH": str(place / "src"), "PYTHONDONTWRITEBYTECODE": "1"}
    command = [sys.executable, "-m", "pytest", "-x", "-rfE", *tests]
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=DEADLINE_S, check=False
    )
    if done.returncode == 0:
        return None
    found = re.search(r"^(?:FAILED|ERROR) (\S.*?)(?: - .*)?$", done.stdout, re.MULTILINE)
    if not found:
        raise SystemExit(
            f"{' '.join(command)} ended with {done.returncode}:\n{done.stdout[-2000:]}{done.stderr[-2000:]}"
        )
    return found[1]


def edit(mutation: Mutation) -> str:
    before, after = (" ".join(text.split()).replace("|", "\\|") for text in (mutation.before, mutation.after))
    return f"`{before}` -> `{after}`"


if __name__ == "__main__":
    main()
