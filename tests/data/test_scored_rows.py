"""Output rows: new columns beside the given ones, and the best of several."""

from __future__ import annotations

from rlhf_suite.data.scored_rows import best, with_columns


def test_given_columns_stay_and_give_way_by_name():
    given = {"input": "q", "response": "old", "label": 7}
    assert with_columns(given, {"response": "new", "label": "7"}, {"label"}) == {
        "input": "q",
        "input_response": "old",
        "response": "new",
        "label": "7",
    }


def test_the_best_is_the_first_of_equals():
    assert best([0.0, 2.0, 2.0, 1.0]) == 1
    assert best([-1.0]) == 0
