"""Text of others on a console: nothing in it acts, nothing in it fails to print, none of it is endless."""

from __future__ import annotations

import pytest

from rlhf_suite.foreign_text import printable


@pytest.mark.parametrize("text", ["plain", "naïve 数学 🙂", "می‌خواهم", "family 👨‍👩‍👧", "a\u00a0b", ""])
def test_what_shows_as_itself_stays(text):
    assert printable(text) == text


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("\x1b[2J\x1b]0;owned\x07", r"\x1b[2J\x1b]0;owned\x07"),
        ("a\r\nb\tc", r"a\r\nb\tc"),
        ("\x7f\x9b31m", r"\x7f\x9b31m"),
        ("invoice\u202efdp.exe", r"invoice\u202efdp.exe"),
        ("one\u2028two", r"one\u2028two"),
        ("\ud800", r"\ud800"),
        ("\x00", r"\x00"),
    ],
)
def test_what_acts_on_a_terminal_is_written_out(text, shown):
    assert printable(text) == shown


def test_lines_and_tabs_stay_where_they_are_asked_for():
    assert printable("a\n\tb\x1b[0m\r", keep_lines=True) == "a\n\tb\\x1b[0m\\r"


def test_a_long_text_is_cut_and_says_how_long_it_was():
    assert printable("x" * 3_000_000, limit=5) == "xxxxx... (3000000 characters)"
    assert printable("x" * 5, limit=5) == "xxxxx"


def test_the_result_can_always_be_encoded():
    printable("".join(map(chr, range(0xD7F0, 0xE010))), limit=10_000).encode()
