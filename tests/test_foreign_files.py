"""Values in files from elsewhere."""

from typing import Any

import pytest

from rlhf_suite.foreign_files import has_type, parse_json


@pytest.mark.notices(
    "truth is a number",
    "foreign_files.py",
    " and not isinstance(value, bool) and abs(value) < LARGEST",
    " and abs(value) < LARGEST",
)
@pytest.mark.parametrize(
    ("value", "wanted", "fits"),
    [
        (True, int, False),
        (True, float, False),
        (3, float, True),
        (3.5, int, False),
        (10**400, int, False),
        (None, float | None, True),
        ("3", float | None, False),
        ({"a": 1.0, "b": None}, dict[str, float | None], True),
        ({"a": "x"}, dict[str, float | None], False),
        (["a", 3], list[str], False),
        ([], dict[str, Any], False),
    ],
)
def test_a_value_has_the_type_that_is_wanted_and_no_other(value, wanted, fits):
    assert has_type(value, wanted) == fits


@pytest.mark.notices("NaN of other tools ends a report", "foreign_files.py", "parse_constant=lambda name: None, ", "")
def test_numbers_that_json_does_not_have_are_absent():
    text = b'{"a": NaN, "b": [Infinity, -Infinity], "c": 1e999, "d": 1.5}'
    assert parse_json(text) == {"a": None, "b": [None, None], "c": None, "d": 1.5}
