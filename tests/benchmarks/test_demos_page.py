"""The pages of demos and learning curves are what their scripts write from the saved results."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))

import curves
import demos


def test_the_page_of_the_demos_is_fresh():
    assert demos.PAGE_FILE.read_text() == demos.page(), "run: python benchmarks/demos.py --write"


def test_the_page_of_the_learning_curves_is_fresh():
    assert curves.PAGE_FILE.read_text() == curves.page(), "run: python benchmarks/curves.py --write"
