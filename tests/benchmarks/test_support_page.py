"""docs/support.md says what was measured, for every type and column."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from rlhf_suite.models.families import IMAGE_TYPES

pytestmark = pytest.mark.stack
ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def support():
    sys.path.insert(0, str(ROOT / "benchmarks"))
    import support

    return support


def test_the_page_is_generated_from_the_results(support):
    assert support.PAGE.read_text() == support.page(support.read_results()), "run benchmarks/support.py"


def test_every_cell_is_a_number_or_a_dash_with_its_reason(support):
    results = support.read_results()
    wanted = {(kind, column) for table in support.TABLES for kind in table.types for column in table.columns}
    assert results.keys() == wanted
    assert [place for place, result in results.items() if result.value is None and not result.note] == []


def test_every_type_that_reads_images_has_a_number_in_every_column(support):
    table = support.TABLES[1]
    assert {*table.types} == {*IMAGE_TYPES}
    assert [result for result in support.in_table(support.read_results(), table) if result.value is None] == []


def test_at_least_25_types_have_the_numbers_of_the_trainer_in_engines(support):
    values = [result.value for (_, column), result in support.read_results().items() if column == "engine"]
    assert sum(value is not None for value in values) >= 25


def test_a_cell_that_was_refused_names_the_reason_below_the_table(support):
    results = {
        ("llama", "sft"): support.Result("llama", "sft", 1.2e-6),
        ("qwen2", "sft"): support.Result("qwen2", "sft", None, "has a reason"),
        ("qwen2", "rm"): support.Result("qwen2", "rm", None, "has a reason"),
        ("qwen3", "rm"): support.Result("qwen3", "rm", 2e-6, "a remark"),
    }
    page = support.page(results)
    assert "| llama | Llama | varlen | 1e-6 | not measured |" in page
    assert "- **sft**, **rm** of qwen2: has a reason" in page and "- **rm** of qwen3: a remark" in page
