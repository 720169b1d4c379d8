"""The rows that a loop trains on: complete responses only, the first of equals, and a reason for each
omitted prompt."""

from __future__ import annotations

import json

import pytest

from rlhf_suite.data.response_groups import (
    ResponseGroup,
    ScoredResponse,
    all_responses,
    best_and_worst_responses,
    best_response,
    response_groups,
)


def group(*scores):
    return ResponseGroup("q", [ScoredResponse(f"a{n}", score) for n, score in enumerate(scores)])


def output(path, *rows):
    """An output of task=generate: (given columns, sample, response, score, finish_reason)."""
    made = [
        {**given, "prompt": "rendered", "response": text, "sample": sample, "score": score, "finish_reason": reason}
        for given, sample, text, score, reason in rows
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in made))
    return path


@pytest.mark.notices(
    "answers that were cut off are trained on", "data/response_groups.py", 'row["finish_reason"] != "length" and', ""
)
def test_groups_have_no_responses_that_are_cut_off_or_empty(tmp_path):
    first, second = {"question": "a"}, {"question": [{"role": "user", "content": "b"}]}
    path = output(
        tmp_path / "out.jsonl",
        (first, 0, "x", 0.5, "stop"), (first, 1, "cut", 1.0, "length"), (first, 2, "y", 0.0, "stop"),
        (second, 0, "cut", 1.0, "length"), (second, 1, " ", 0.0, "stop"),
    )  # fmt: skip
    assert list(response_groups(path, "question")) == [
        ResponseGroup("a", [ScoredResponse("x", 0.5), ScoredResponse("y", 0.0)]),
        ResponseGroup([{"role": "user", "content": "b"}], []),
    ]


def test_groups_are_separated_also_if_responses_are_missing(tmp_path):
    rows = [("a", 1), ("a", 2), ("b", 3), ("c", 0), ("c", 1)]
    made = [{"q": q, "prompt": q, "sample": s, "response": "x", "score": s, "finish_reason": "stop"} for q, s in rows]
    (tmp_path / "out.jsonl").write_text("".join(json.dumps(row) + "\n" for row in made))
    found = [
        (group.prompt, [a.score for a in group.responses]) for group in response_groups(tmp_path / "out.jsonl", "q")
    ]
    assert found == [("a", [1, 2]), ("b", [3]), ("c", [0, 1])]


@pytest.mark.parametrize(
    ("given", "key"),
    [({"input_prompt": "a"}, "prompt"), ({"one": "a", "two": None}, "one,two"), ({"input_score": "a"}, "score")],
)
def test_the_prompt_is_found_under_the_name_that_the_output_gives_it(tmp_path, given, key):
    path = output(tmp_path / "out.jsonl", (given, 0, "x", 0.5, "stop"))
    assert next(response_groups(path, key)).prompt == "a"


def test_the_best_response_is_the_first_of_equals():
    assert best_response(group(0.0, 1.0, 1.0), None) == [{"input": "q", "output": "a1", "score": 1.0}]


def test_a_prompt_without_a_good_enough_response_is_left_out():
    assert best_response(group(0.25, 0.5), 0.75) == "no response scores 0.75 or more"
    assert best_response(group(0.25, 0.75), 0.75)[0]["output"] == "a1"
    assert best_response(group(), None) == "every response is cut off or empty"


def test_a_pair_is_the_first_best_and_the_first_worst():
    assert best_and_worst_responses(group(0.5, 0.0, 1.0, 0.0, 1.0)) == [
        {"input": "q", "chosen": "a2", "rejected": "a1", "chosen_score": 1.0, "rejected_score": 0.0}
    ]


def test_a_prompt_whose_responses_all_score_the_same_is_left_out():
    assert best_and_worst_responses(group(1.0, 1.0)) == "all responses score the same"
    assert best_and_worst_responses(group(1.0)) == "all responses score the same"
    assert best_and_worst_responses(group()) == "every response is cut off or empty"


def test_all_responses_are_rows_with_their_scores():
    rows = all_responses(group(0.0, 1.0))
    assert [(row["output"], row["score"]) for row in rows] == [("a0", 0.0), ("a1", 1.0)]
    assert all_responses(group()) == "every response is cut off or empty"
