"""The mutations still fit the sources, and the page lists all of them."""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path

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
