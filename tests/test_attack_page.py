"""A section of the page of attacks takes the place of the one with its heading; the others stay."""

from __future__ import annotations

import pytest

from attack_page import PAGE, Section

OLD = "<!-- by whom -->\n\n# One\n\nold\n\n| a |\n|---|\n| 1 |\n\n## Two\n\nkept\n"


def test_a_section_takes_the_place_of_the_old_one(tmp_path):
    page = tmp_path / "page.md"
    page.write_text(OLD)
    one = Section("# One", "new", ("a", "b"), "At last.")
    one.add("x | y", 2)
    one.write(page)
    assert page.read_text() == (
        "<!-- by whom -->\n\n# One\n\nnew\n\n| a | b |\n|---|---|\n| x \\| y | 2 |\n\nAt last.\n\n## Two\n\nkept\n"
    )
    two = Section("## Two", "changed", ("c",))
    two.write(page)
    assert page.read_text().endswith("At last.\n\n## Two\n\nchanged\n\n| c |\n|---|\n")


def test_a_heading_that_the_page_does_not_have_is_an_error(tmp_path):
    page = tmp_path / "page.md"
    page.write_text(OLD)
    with pytest.raises(AssertionError, match="no heading '## Three'"):
        Section("## Three", "", ("a",)).write(page)


def test_every_section_of_the_page_has_a_table():
    sections = PAGE.read_text().split("\n## ")
    assert len(sections) == 7 and all("\n|---|" in section for section in sections)
