"""pytest imports test files by their names alone: a second file of a name stops the whole suite."""

from collections import Counter
from pathlib import Path


def test_no_two_test_files_have_the_same_name():
    names = Counter(file.name for file in Path(__file__).parents[1].rglob("test_*.py"))
    assert [name for name, count in names.items() if count > 1] == []
