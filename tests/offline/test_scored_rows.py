"""Output rows: new columns beside the given ones, and the best of several."""

from __future__ import annotations

import pytest

from rlhf_suite.data.response_groups import input_name
from rlhf_suite.offline.scored_rows import best, pair, with_columns


def test_given_columns_stay_and_give_way_by_name():
    given = {"input": "q", "response": "old", "label": 7}
    assert with_columns(given, {"response": "new", "label": "7"}, {"label"}) == {
        "input": "q",
        "input_response": "old",
        "response": "new",
        "label": "7",
    }


@pytest.mark.notices(
    "a column of the input is lost where the output renames another to its name",
    "offline/scored_rows.py",
    "return name in made or (before != name and before in kept and is_taken(before))",
    "return name in made",
)
def test_no_column_is_lost_however_they_are_called():
    given = {"input_prompt": 1, "prompt": 2, "input_input_prompt": 3, "input_other": 4, "input_label": 5, "label": 6}
    made = with_columns(given, {"prompt": "new", "label": "6"}, {"label"})
    assert made == {
        "input_input_prompt": 1,
        "input_prompt": 2,
        "input_input_input_prompt": 3,
        "input_other": 4,
        "input_label": 5,
        "prompt": "new",
        "label": "6",
    }
    columns = {name: input_name(name, made) for name in given if name != "label"}
    assert {name: made[column] for name, column in columns.items()} == {
        name: value for name, value in given.items() if name != "label"
    }


@pytest.mark.notices(
    "of equal answers the last is the best",
    "offline/scored_rows.py",
    "(scores[index], -index)",
    "(scores[index], index)",
)
def test_the_best_is_the_first_of_equals():
    assert best([0.0, 2.0, 2.0, 1.0]) == 1
    assert best([-1.0]) == 0


def test_a_pair_is_the_best_and_the_worst_beside_what_they_share():
    rows = [{"id": 1, "response": text, "sample": i, "num_tokens": 3} for i, text in enumerate("abcd")]
    assert pair(rows, [0.5, 2.0, 2.0, -1.0], "response") == {
        "id": 1,
        "chosen": "b",
        "rejected": "d",
        "chosen_score": 2.0,
        "rejected_score": -1.0,
    }


def test_equal_scores_make_no_pair():
    rows = [{"response": text} for text in "ab"]
    assert pair(rows, [1.0, 1.0], "response") is None
    assert pair(rows[:1], [1.0], "response") is None
