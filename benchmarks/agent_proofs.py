"""Runs the tests that prove what agents and asynchronous training promise, and writes docs/agent_proofs.md.

    python benchmarks/agent_proofs.py --write            # all rows
    python benchmarks/agent_proofs.py --rows 4 5 --write # only these; none with --rows and no number

Each row has a promise, the tests that prove it, the figures that were measured for it, and mistakes that its tests
must notice. A run of a row is a line of results/agent_proofs.jsonl, with the figures that the tests recorded
(`record_property`). Other figures are read from saved lines and from tables of pages.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import time
from collections.abc import Sequence
from typing import Any
from xml.etree import ElementTree

from agent_proofs_list import ROWS, Count, Figure, Row, Saved
from common import RESULTS, ROOT, publish, scratch
from mutations import known_rows, mutations

NAME = "agent_proofs"
DOCS = ROOT / "docs"
PAGE = DOCS / f"{NAME}.md"
HEAD = """<!-- Written by: python benchmarks/agent_proofs.py --write -->

# Proofs for agents and asynchronous training

What agents ([agents.md](agents.md)) and asynchronous training ([rl_async.md](rl_async.md)) promise, and what
was seen. `python benchmarks/agent_proofs.py --rows 4 5 --write` runs the tests of rows 4 and 5 and writes this page;
without `--rows` it runs all of them. The outcome has the number of tests, the seconds on two CPU cores, the day
and the commit. A figure without a link was recorded by the tests. The last column names mistakes that were made
on purpose in a copy of the sources, and that a test noticed ([mutations.md](mutations.md) has the edits).

| | what must hold | figures | outcome | mistakes that are noticed |
|---|---|---|---|---|
"""


def ran(row: Row) -> dict[str, Any]:
    """Run the tests of a row, and return their outcome with the figures that they recorded."""
    with scratch() as folder:
        report = folder / "report.xml"
        words = [sys.executable, "-m", "pytest", f"--junitxml={report}", "-o", "junit_family=xunit1", *row.tests]
        began = time.monotonic()
        code = subprocess.run(words, cwd=ROOT, stdout=sys.stderr, check=False).returncode
        seconds = round(time.monotonic() - began)
        suite = ElementTree.parse(report).getroot()[0]
    figures: dict[str, list[float]] = {}
    for each in suite.iter("property"):
        figures.setdefault(each.attrib["name"], []).append(float(each.attrib["value"]))
    counts = {name: int(suite.attrib[name]) for name in ("tests", "failures", "errors", "skipped")}
    passed = code == 0 and counts["skipped"] < counts["tests"]
    found = {"tests": list(row.tests), "passed": passed, "counts": counts, "seconds": seconds}
    return found | {"commit": commit(), "figures": figures}


def commit() -> str:
    """Return the commit of the sources and the tests, marked where they are not as committed."""
    changed = git("status", "--porcelain", "--", "src", "tests", "conf")
    return git("rev-parse", "--short=8", "HEAD") + (" with changes" if changed else "")


def git(*words: str) -> str:
    return subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()


def saved_lines(name: str) -> list[dict[str, Any]]:
    """Return the lines of a file of results, the newest first."""
    path = RESULTS / f"{name}.jsonl"
    return [json.loads(line) for line in reversed(path.read_text().splitlines())] if path.exists() else []


def figure_of(figure: Figure) -> str:
    """Return a figure with its place and day; LookupError if it is not there."""
    if isinstance(figure, Saved):
        text, day, link = newest(figure)
        return f"{text} ([{day}]({link}))"
    rows = table_rows(figure.page, figure.table)
    if isinstance(figure, Count):
        fitting = [row for row in rows if row[figure.column].startswith(figure.begins)]
        text = figure.text.format(len(fitting), len(rows))
    else:
        row = next((row for row in rows if figure.row in next(iter(row.values()))), None)
        if row is None:
            raise LookupError(f"docs/{figure.page} has no row {figure.row!r}")
        text = figure.text.format_map(row)
    return f"{text} ([{git('log', '-1', '--format=%cs', '--', f'docs/{figure.page}')}]({figure.page}))"


def newest(figure: Saved) -> tuple[str, str, str]:
    """Return what the newest line with all fields of a figure says, its day, and its file."""
    for line in saved_lines(figure.file):
        try:
            return figure.text.format_map(line), line["date"][:10], f"../benchmarks/results/{figure.file}.jsonl"
        except KeyError:
            continue
    raise LookupError(f"no line of benchmarks/results/{figure.file}.jsonl has the fields of {figure.text!r}")


def table_rows(page: str, first: str) -> list[dict[str, str]]:
    """Return the rows of the table of a page whose first columns are `first`, by the names of the columns."""
    lines = (DOCS / page).read_text().splitlines()
    begin = next((place for place, line in enumerate(lines) if line.startswith(f"| {first} |")), None)
    if begin is None:
        raise LookupError(f"docs/{page} has no table that begins with the columns {first!r}")
    end = next((place for place, line in enumerate(lines[begin:], begin) if not line.startswith("|")), len(lines))
    names, *rows = (cells(line) for line in (lines[begin], *lines[begin + 2 : end]))
    return [dict(zip(names, row, strict=True)) for row in rows]


def cells(line: str) -> list[str]:
    """Return the cells of a line of a table; an escaped bar does not end one."""
    return [cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]]


def problems(rows: Sequence[Row]) -> list[str]:
    """Return what the rows name that does not exist: tests, mistakes, figures, pages."""
    by = {mutation.title: mutation.test.partition("::")[0] for mutation in mutations()}
    found = [f"{test} does not exist" for row in rows for test in row.tests if not exists(test)]
    found += [f"there is no mistake {name!r}" for row in rows for name in row.mistakes if name not in by]
    found += [
        f"{row.promise}: no test of it is to notice {name!r}"
        for row in rows
        for name in row.mistakes
        if name in by and by[name] not in {test.partition("::")[0] for test in row.tests}
    ]
    found += [f"docs/{page} does not exist" for row in rows for page in row.pages if not (DOCS / page).exists()]
    for row in rows:
        for figure in row.figures:
            try:
                figure_of(figure)
            except LookupError as error:
                found.append(f"{row.promise}: {error}")
    return found


def exists(test: str) -> bool:
    """Return whether `file` or `file::function` is a test."""
    file, _, function = test.partition("::")
    path = ROOT / file
    return path.is_file() and (not function or f"def {function}(" in path.read_text())


def page(rows: Sequence[Row]) -> str:
    """Return the page. The outcome of a row is that of the newest run of exactly its tests."""
    runs = {tuple(line["tests"]): line for line in reversed(saved_lines(NAME))}
    noticed = {name: cells(line)[-1] for name, line in known_rows(mutations()).items()}
    lines = []
    for number, row in enumerate(rows, start=1):
        run = runs.get(row.tests)
        figures = [*(recorded(run["figures"]) if run else ()), *map(figure_of, row.figures)]
        figures += [f"[{name}]({name})" for name in row.pages]
        mistakes = "; ".join(name + state(noticed.get(name)) for name in row.mistakes)
        columns = (number, row.promise, "; ".join(figures), outcome(run), mistakes)
        lines.append(f"| {' | '.join(map(str, columns))} |")
    commands = [f"{number}. `python -m pytest {' '.join(row.tests)}`" for number, row in enumerate(rows, start=1)]
    return HEAD + "\n".join(lines) + "\n\n## The tests of each row\n\n" + "\n".join(commands) + "\n"


def state(noticed: str | None) -> str:
    """Return what is to be said of a mistake that no test is known to notice."""
    return " (NOT MADE YET)" if noticed is None else " (SURVIVED)" if noticed == "SURVIVED" else ""


def recorded(figures: dict[str, list[float]]) -> list[str]:
    """Return the figures of tests, each with its range over tests."""
    ranges = {name: dict.fromkeys(map(number, (min(values), max(values)))) for name, values in figures.items()}
    return [f"{name}: {' to '.join(ends)}" for name, ends in ranges.items()]


def number(value: float) -> str:
    return f"{value:,.0f}" if value.is_integer() else f"{value:.3g}"


def outcome(run: dict[str, Any] | None) -> str:
    if run is None:
        return "not run"
    counts = {name.removesuffix("s") if count == 1 else name: count for name, count in run["counts"].items() if count}
    words = [
        *(f"{count} {name}" for name, count in counts.items()),
        f"{run['seconds']} s",
        run["date"][:10],
        run["commit"],
    ]
    return f"{'passed' if run['passed'] else 'FAILED'}: {', '.join(words)}"


def main() -> None:
    """Run the chosen rows, write the page; exit 1 if a row failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    rows = range(1, len(ROWS) + 1)
    parser.add_argument("--rows", nargs="*", type=int, choices=rows, default=rows, metavar="N")
    parser.add_argument("--write", action="store_true", help="write docs/agent_proofs.md")
    given = parser.parse_args()
    if found := problems(ROWS):
        sys.exit("\n".join(["mend benchmarks/agent_proofs_list.py:", *found]))
    runs = []
    for row in given.rows:
        runs.append(ran(ROWS[row - 1]))
        publish(NAME, {"row": row, **runs[-1]}, save=True)
    if given.write:
        PAGE.write_text(page(ROWS))
    sys.exit(not all(run["passed"] for run in runs))


if __name__ == "__main__":
    main()
