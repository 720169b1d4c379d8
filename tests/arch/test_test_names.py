"""pytest, ranks of the tests and benchmarks import files by their names alone: each name stands for one file."""

from collections import Counter
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_no_two_files_of_the_tests_and_benchmarks_have_the_same_name():
    files = [file for folder in ("tests", "benchmarks") for file in (ROOT / folder).rglob("*.py")]
    names = Counter(file.stem for file in files if file.name != "conftest.py")
    assert len(names) > 100
    assert [name for name, count in names.items() if count > 1] == []
