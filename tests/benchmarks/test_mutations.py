"""The mutations still fit the sources, and the tests that are to notice them exist."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "benchmarks"))

from mutation_list import MUTATIONS  # noqa: E402 - found by the line above


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: mutation.name)
def test_a_mutation_has_one_place_and_its_tests(mutation):
    text = (ROOT / "src" / "rlhf_suite" / mutation.file).read_text()
    assert text.count(mutation.before) == 1, (
        f"{mutation.before!r} in {mutation.file}: mend benchmarks/mutation_list*.py"
    )
    assert (ROOT / mutation.tests[0]).exists()
