"""The mutations still fit the sources, and the page lists all of them."""

from __future__ import annotations

import subprocess
import sys
from collections import Counter
from pathlib import Path

import psutil
import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "benchmarks"))

from mutations import PACKAGE, PAGE, Mutation, marks, mutations  # noqa: E402 - found by the line above

MUTATIONS = mutations()


def test_a_mutation_has_one_place():
    texts = {file: (ROOT / PACKAGE / file).read_text() for file in {mutation.file for mutation in MUTATIONS}}
    wrong = [(m.test, m.title, m.file, m.before) for m in MUTATIONS if texts[m.file].count(m.before) != 1]
    assert wrong == [], "mend these marks: the file does not have exactly one such text"


def test_a_mutation_changes_something_under_a_title_of_its_own():
    assert [m.title for m in MUTATIONS if m.before == m.after] == []
    assert [title for title, count in Counter(m.title for m in MUTATIONS).items() if count > 1] == []


def test_every_mark_is_on_a_test_and_is_read():
    written = sum(path.read_text().count("\n@pytest.mark.notices(") for path in (ROOT / "tests").rglob("*.py"))
    assert len(MUTATIONS) == written > 500
    assert {m.test.partition("::")[2][:5] for m in MUTATIONS} == {"test_"}


def test_the_page_has_every_mutation():
    page = PAGE.read_text()
    assert [m.title for m in MUTATIONS if m.title not in page] == [], "run: python benchmarks/mutations.py --page"


def test_a_mark_is_read_without_an_import(monkeypatch, tmp_path):
    monkeypatch.setattr("mutations.ROOT", tmp_path)
    path = tmp_path / "test_it.py"
    path.write_text(
        "import nothing\n\n@pytest.mark.notices('a title', 'a.py', 'one ' 'text', 'another', cases='b')\n"
        "@pytest.mark.parametrize('x', [1])\nasync def test_it(x): ...\n"
    )
    assert [*marks(path)] == [Mutation("test_it.py::test_it", "a title", "a.py", "one text", "another", cases="b")]


@pytest.mark.parametrize("words", ["'a title', 'a.py', 'text'", "'a title', 'a.py', 'text', TEXT"])
def test_a_mark_that_cannot_be_read_is_an_error(monkeypatch, tmp_path, words):
    monkeypatch.setattr("mutations.ROOT", tmp_path)
    path = tmp_path / "test_it.py"
    path.write_text(f"@pytest.mark.notices({words})\ndef test_it(): ...\n")
    with pytest.raises((TypeError, ValueError)):
        list(marks(path))


def in_a_process(*lines: str) -> list[str]:
    """Run Python with all of benchmarks/mutations.py at hand in a process of its own, and return what it prints."""
    script = "\n".join(
        [f"import sys; sys.path.insert(0, {str(ROOT / 'benchmarks')!r})", "from mutations import *", *lines]
    )
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=600, check=True)
    return run.stdout.splitlines()


def test_a_test_that_takes_too_long_or_takes_its_process_with_it_is_a_verdict(tmp_path):
    file = tmp_path / "test_it.py"
    file.write_text("import os, signal\n\ndef test_it():\n    os.kill(os.getpid(), signal.SIGSEGV)\n")
    limits = (0.01, 600)  # the first is over before the tests begin
    lines = [f"print(first_failure(Path({str(tmp_path)!r}), [{str(file)!r}], '', {limit}))" for limit in limits]
    assert in_a_process(*lines) == [f"`{file}` (time-out: 0.01 s)", f"`{file}` (SIGSEGV)"]


def test_no_process_outlives_a_run():
    """Neither those of other sessions, nor those whose parents have ended."""
    shell = "setsid sleep 1000 >/dev/null 2>&1 & echo $!; sleep 1000 >/dev/null 2>&1 & echo $!"
    processes = in_a_process(
        "import subprocess",
        "adopt_orphans()",
        f"subprocess.run(['sh', '-c', {shell!r}], check=True)",
        "print(len(psutil.Process().children(recursive=True)), flush=True)",
        "end_children()",
    )
    assert processes[2:] == ["2"]
    assert [pid for pid in processes[:2] if psutil.pid_exists(int(pid))] == []
