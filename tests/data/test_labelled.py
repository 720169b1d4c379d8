"""Labelled responses, and each prompt with the response to another one."""

from __future__ import annotations

import pytest

from rlhf_suite.config.declarations.data import DataConfig
from rlhf_suite.data.batch import Example
from rlhf_suite.data.encode import encode_rows
from rlhf_suite.data.preferences import LabelledEncoder, MismatchedPairs
from rlhf_suite.data.row import BadRows, Row, RowError
from rlhf_suite.errors import UserError


def example(prompt, answer, label=1.0):
    return Example([*prompt, *answer], [0] * len(prompt) + [1] * len(answer), "f:1", {"label": label})


@pytest.mark.notices(
    "a mismatched answer is one to the same prompt",
    "data/preferences.py",
    "% len(ends)] + 1) % len(prompts)",
    "% len(ends)]) % len(prompts)",
)
def test_the_mismatched_response_is_the_next_one_to_another_prompt():
    a, b = [1, 2], [3]
    rows = [example(a, [10]), example(a, [11, 12]), example(b, [13], 0.0), example(a, [14])]
    found = [group.examples for group in MismatchedPairs(rows, 99)]
    assert [pair[0] for pair in found] == rows
    assert [pair[1].ids for pair in found] == [[1, 2, 13], [1, 2, 13], [3, 14], [1, 2, 13]]
    assert [pair[1].mask for pair in found] == [[0, 0, 1], [0, 0, 1], [0, 1], [0, 0, 1]]
    assert [pair[1].numbers for pair in found] == [pair[0].numbers for pair in found]


def test_the_mismatched_response_is_cut_like_any_other():
    rows = [example([1, 2, 3], [4]), example([5], [6, 7, 8])]
    assert MismatchedPairs(rows, 4)[0].examples[1].ids == [1, 2, 3, 6]


def test_a_single_prompt_is_refused():
    with pytest.raises(UserError, match="all rows have the same prompt"):
        MismatchedPairs([example([1], [2]), example([1], [3])], 9)


@pytest.mark.parametrize(
    ("label", "number"),
    [
        *((yes, 1.0) for yes in (1, 1.0, True, "1", "true", "True", " TRUE\t", "yes")),
        *((no, 0.0) for no in (0, 0.0, False, "0", "false", "False", "no", "0.0")),
    ],
)
def test_labels_are_one_or_zero(tokenizer, label, number):
    row = Row({"input": "hello", "output": "user", "label": label}, "f", 1)
    assert LabelledEncoder(tokenizer, DataConfig.of("kto")).encode(row).numbers == {"label": number}


@pytest.mark.parametrize("label", [0.5, 2, "good", None, "", "truth", [1]])
def test_other_labels_are_bad_rows(tokenizer, label):
    row = Row({"input": "hello", "output": "user", "label": label}, "f", 1)
    with pytest.raises(RowError, match="column 'label'"):
        LabelledEncoder(tokenizer, DataConfig.of("kto")).encode(row)


PAIR = {"prompt": "hello", "chosen": "user", "rejected": "there"}


def test_a_pair_is_a_desirable_and_an_undesirable_response(tokenizer):
    config = DataConfig.of("kto", prompt_key="prompt", chosen_key="chosen", rejected_key="rejected")
    good, bad = LabelledEncoder(tokenizer, config).encode(Row(PAIR, "f", 1))
    single = LabelledEncoder(tokenizer, DataConfig.of("kto"))
    for example, answer, label in ((good, "user", 1), (bad, "there", 0)):
        assert example == single.encode(Row({"input": "hello", "output": answer, "label": label}, "f", 1))


def test_pairs_of_dialogues_need_no_column_of_the_prompt(tokenizer):
    config = DataConfig.of("kto", chosen_key="chosen", rejected_key="rejected", turn_markers=["Human:", "Assistant:"])
    values = {name: f"Human: hello\n\nAssistant: {text}" for name, text in (("chosen", "user"), ("rejected", "there"))}
    good, bad = LabelledEncoder(tokenizer, config).encode(Row(values, "f", 1))
    assert (good.numbers["label"], bad.numbers["label"]) == (1, 0) and good.mask.index(1) == bad.mask.index(1)


def test_the_responses_of_a_pair_have_their_labels_and_count_as_one_row(tokenizer):
    config = DataConfig.of("kto", prompt_key="prompt", chosen_key="chosen", rejected_key="rejected")
    bad = BadRows("skip")
    rows = [Row(PAIR, "f", 1), Row(PAIR | {"rejected": "user"}, "f", 2), Row(PAIR | {"rejected": ""}, "f", 3)]
    assert len(list(encode_rows(LabelledEncoder(tokenizer, config), rows, bad))) == 2
    assert (bad.rows, bad.left_out.total(), bad.bad.total()) == (3, 1, 1)
