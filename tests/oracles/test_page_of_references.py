"""docs/oracles.md has a line for every reference, and a test for it."""

from __future__ import annotations

import re
from pathlib import Path

from reference import DATA, SUPERVISED

PAGE = Path(__file__).parents[2] / "docs" / "oracles.md"


def test_every_reference_is_on_the_page_and_is_used():
    text = PAGE.read_text()
    assert set(re.findall(r"^\| `([^`]+)`", text, re.MULTILINE)) == {*DATA["references"], *SUPERVISED["references"]}
    assert "not used" not in text, "run python benchmarks/oracles.py"
