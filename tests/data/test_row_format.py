"""Rows of another format: a user's own function makes the columns that an encoder reads."""

from __future__ import annotations

from dataclasses import replace

import pytest

from rlhf_suite.data.cache import fingerprint
from rlhf_suite.data.encode import FormattedEncoder, encode_rows
from rlhf_suite.data.row import BadRows, Row
from rlhf_suite.python_source import SourceError
from rlhf_suite.registry import row_format

TEXT = """
def twice(row):
    return [{"input": row["text"]}, {"input": row["text"].upper()}]

def chosen(row):
    return row if row["text"] != "b" else None

def no_rows(row):
    return [row] if row["text"] != "b" else []

def wrong(row):
    return row["text"]

def failing(row):
    return row["missing"]
"""


class Inputs:
    """An encoder that keeps the column `input`, or `text`."""

    def encode(self, row: Row) -> list[str]:
        return [str(row.values.get("input", row.values.get("text")))]


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "own.py"
    path.write_text(TEXT)
    return path


def encoded(file, function):
    encoder = FormattedEncoder(Inputs(), f"{file}:{function}", "digest of the file")
    bad = BadRows("skip")
    rows = [Row({"text": text}, "rows.jsonl", line) for line, text in enumerate("abc", start=1)]
    return list(encode_rows(encoder, rows, bad)), bad


def test_a_row_may_become_several_or_none(file):
    assert encoded(file, "twice")[0] == ["a", "A", "b", "B", "c", "C"]
    for function, returned in (("chosen", "None"), ("no_rows", "[]")):
        items, bad = encoded(file, function)
        assert items == ["a", "c"] and f"data.row_format returned {returned}" in bad.summary()


def test_what_is_not_a_dict_and_what_raises_are_reasons_of_the_row(file):
    assert "data.row_format returned str, not a dict of columns" in encoded(file, "wrong")[1].summary()
    assert "data.row_format raised KeyError: 'missing'" in encoded(file, "failing")[1].summary()


def test_encoded_rows_are_found_again_only_while_the_file_is_the_same(file):
    encoder = FormattedEncoder(Inputs(), f"{file}:twice", "digest of the file")
    assert fingerprint(encoder) == fingerprint(replace(encoder)) != fingerprint(replace(encoder, digest="another"))


def test_a_file_that_cannot_be_imported_says_why(tmp_path):
    broken = tmp_path / "broken.py"
    broken.write_text("import no_such_module_of_test\ndef made(row): ...\n")
    with pytest.raises(SourceError, match=r"broken.py:made: importing it raised ModuleNotFoundError: No module named"):
        row_format.load(f"{broken}:made")
