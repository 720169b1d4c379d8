"""Data sources: whether they exist, and whether the first row has the columns."""

from __future__ import annotations

import gzip
import json

import pytest

from rlhf_suite.config.check.sources import first_columns, is_missing
from rlhf_suite.preflight.inspections.sources import source_problems

ROW = {"question": "2+2", "answer": "4"}


def files(tmp_path):
    for name, text in {
        "lines.jsonl": json.dumps(ROW) + "\n" + json.dumps(ROW),
        "list.json": json.dumps([ROW, ROW], indent=2),
        "wrapped.json": json.dumps({"data": [ROW]}),
        "marked.json": "\ufeff" + json.dumps([ROW]),
        "table.csv": 'question,answer\n"a, b",c\n',
    }.items():
        (tmp_path / name).write_text(text)
        yield tmp_path / name


def test_columns_are_read_from_every_kind_of_text_file(tmp_path):
    for path in files(tmp_path):
        assert first_columns(path) == ["question", "answer"], path


def test_a_column_that_is_not_there_is_told_with_those_that_are(tmp_path):
    for path in files(tmp_path):
        (problem,) = source_problems("data.dataset", str(path), {"data.input_key": "input"})
        assert problem.key == "data.input_key"
        assert "question, answer" in problem.fix


def test_a_file_with_the_columns_is_fine(tmp_path):
    for path in files(tmp_path):
        assert not [*source_problems("data.dataset", str(path), {"data.input_key": "question"})]


def test_nothing_is_said_about_what_cannot_be_peeked_into(tmp_path):
    for name in ("x.parquet", "broken.json"):
        (tmp_path / name).write_text("{broken")
        assert not [*source_problems("data.dataset", str(tmp_path / name), {"data.input_key": "input"})]


def test_an_empty_file_is_told(tmp_path):
    (tmp_path / "empty.jsonl").touch()
    (problem,) = source_problems("data.dataset", str(tmp_path / "empty.jsonl"), {})
    assert "is empty" in problem.what


@pytest.mark.parametrize("name", ["none.jsonl", "./folder", "/no/where", "data/none.parquet", "../none.csv@sub"])
def test_a_path_that_is_not_there_is_missing(name):
    assert is_missing(name)


@pytest.mark.parametrize("name", ["builtin:reverse", "openai/gsm8k", "squad", "openai/gsm8k@main"])
def test_a_name_may_be_on_the_hub(name):
    assert not is_missing(name)


def test_each_source_of_a_list_is_looked_at(tmp_path):
    *_, last = files(tmp_path)
    problems = [*source_problems("data.dataset", f"{last}, none.jsonl,none.csv", {})]
    assert len(problems) == 2


def test_a_compressed_file_is_looked_into(tmp_path):
    for path in [*files(tmp_path)]:
        packed = path.with_name(f"{path.name}.gz")
        packed.write_bytes(gzip.compress(path.read_bytes()))
        assert first_columns(packed) == ["question", "answer"], packed
    (tmp_path / "broken.jsonl.gz").write_bytes(b"nonsense")
    assert first_columns(tmp_path / "broken.jsonl.gz") is None
    assert is_missing("none.jsonl.gz")


def test_the_first_file_of_a_pattern_is_looked_into(tmp_path):
    [*files(tmp_path)]
    pattern = str(tmp_path / "li*.js*")
    assert not [*source_problems("data.dataset", pattern, {"data.input_key": "question"})]
    (problem,) = source_problems("data.dataset", pattern, {"data.input_key": "input"})
    assert problem.key == "data.input_key" and "lines.jsonl has no column 'input'" in problem.what


def test_a_pattern_that_stands_for_nothing_or_for_other_files_is_a_problem(tmp_path):
    (problem,) = source_problems("data.dataset", str(tmp_path / "*.jsonl"), {})
    assert problem.key == "data.dataset" and f"no file matches {tmp_path / '*.jsonl'}" in problem.what
    (tmp_path / "notes.md").touch()
    (problem,) = source_problems("data.dataset", str(tmp_path / "*"), {})
    assert "notes.md, which is not a data file" in problem.what
