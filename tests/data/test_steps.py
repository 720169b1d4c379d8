"""Step labels stay with their placeholders, also under truncation."""

from __future__ import annotations

import pytest

from rlhf_suite.config.declarations.algo import AlgoConfig
from rlhf_suite.config.declarations.data import DataConfig
from rlhf_suite.data.encode import encode_rows
from rlhf_suite.data.row import BadRows, Row, RowError
from rlhf_suite.data.steps import StepEncoder
from rlhf_suite.errors import UserError

TEXT = "1 2;3;4 5 6;7;"


def encoder(tokenizer, names=("+", "-"), max_len=99):
    algo = AlgoConfig.of("prm", placeholder_token=";", reward_tokens=names and list(names))
    return StepEncoder(tokenizer, DataConfig.of("prm", max_len=max_len), algo)


def encode(tokenizer, labels, text=TEXT, **options):
    return encoder(tokenizer, **options).encode(Row({"input": text, "label": labels}, "f", 1))


def supervised(tokenizer, example):
    """(token, target, weight) of every masked token."""
    numbers = example.token_numbers
    return [
        (tokenizer.decode([example.ids[i]]), numbers["target"][i], numbers["weight"][i])
        for i in range(len(example))
        if example.mask[i]
    ]


def test_every_placeholder_has_its_label(tokenizer):
    example = encode(tokenizer, ["+", "-", "-", "+"])
    assert supervised(tokenizer, example) == [(";", 0, 1), (";", 1, 1), (";", 1, 1), (";", 0, 1)]
    assert tokenizer.decode(example.ids) == TEXT and not example.truncated


def test_a_cut_keeps_the_labels_of_the_placeholders_that_are_left(tokenizer):
    ids = encode(tokenizer, ["+"] * 4).ids
    places = [i for i, token in enumerate(ids) if tokenizer.decode([token]) == ";"]
    for max_len in range(places[0] + 1, len(ids)):
        example = encode(tokenizer, [0.1, 0.2, 0.3, 0.4], max_len=max_len)
        left = sum(place < max_len for place in places)
        assert supervised(tokenizer, example) == [(";", 0, label) for label in (0.1, 0.2, 0.3, 0.4)[:left]]
        assert example.truncated and len(example) == max_len
    with pytest.raises(RowError, match="no placeholder within"):
        encode(tokenizer, ["+"] * 4, max_len=places[0])


def test_without_reward_tokens_labels_are_tokens_of_the_vocabulary(tokenizer):
    example = encode(tokenizer, ["a", "b"], text="1;2;", names=None)
    expected = [tokenizer("a")["input_ids"][0], tokenizer("b")["input_ids"][0]]
    assert [target for _, target, _ in supervised(tokenizer, example)] == expected


LISTED = {"question": "what is 1?", "steps": ["hello; there", "the user", "0"], "labels": [1, 0, True]}


def step_encoder(tokenizer, chat=False, max_len=99):
    algo = AlgoConfig.of("prm", placeholder_token=";", reward_tokens=["+", "-"])
    config = DataConfig.of(
        "prm", max_len=max_len, input_key="question", steps_key="steps", label_key="labels", apply_chat_template=chat
    )
    return StepEncoder(tokenizer, config, algo)


def listed(tokenizer, chat=False, max_len=99, **values):
    return step_encoder(tokenizer, chat, max_len).encode(Row(LISTED | values, "f", 1))


def test_a_list_of_steps_gets_its_placeholders(tokenizer):
    example = listed(tokenizer)
    assert tokenizer.decode(example.ids) == "what is 1?\nhello; there;\nthe user;\n0;"
    assert supervised(tokenizer, example) == [(";", 0, 1), (";", 0, 0), (";", 0, 1)]
    assert [example.mask[i] for i, token in enumerate(example.ids) if tokenizer.decode([token]) == ";"] == [0, 1, 1, 1]


def test_steps_are_the_assistants_turn_in_a_chat(tokenizer):
    example = listed(tokenizer, chat=True)
    start = "<|im_start|>user\nwhat is 1?<|im_end|>\n<|im_start|>assistant\n"
    assert tokenizer.decode(example.ids) == start + "hello; there;\nthe user;\n0;"


@pytest.mark.parametrize(
    ("values", "reason"),
    [
        ({"labels": [1, 0]}, "the number of labels is not the number of steps"),
        ({"steps": "one"}, "column 'steps' is not a list of texts"),
        ({"steps": ["one", 2, "two"]}, "column 'steps' is not a list of texts"),
        ({"steps": ["", " ", "\n"]}, "column 'steps' has no step that is not blank"),
        ({"labels": [1, 0, -1]}, "neither the text of a token nor a probability"),
    ],
)
def test_steps_that_do_not_fit_are_bad_rows(tokenizer, values, reason):
    with pytest.raises(RowError, match=reason):
        listed(tokenizer, **values)


def test_a_blank_step_is_dropped_with_its_label_and_noted(tokenizer):
    steps, labels = ["hello; there", " \n", "the user", "0"], [1, 0, 0, 1]
    example, same = listed(tokenizer, steps=steps, labels=labels), listed(tokenizer)
    assert (example, example.notes) == (same, ("a blank step dropped with its label, as in scoring",))
    bad = BadRows("stop")
    row = Row(LISTED | {"steps": steps, "labels": labels}, "f", 1)
    assert list(encode_rows(step_encoder(tokenizer), [row], bad)) == [example]
    assert bad.summary() == f"changed of 1 rows: 1 x {example.notes[0]} (first f:1)"


@pytest.mark.parametrize(
    ("labels", "options", "reason"),
    [
        (["+"] * 3, {}, "the number of labels is not the number of placeholders"),
        (["+", "-", "+", "?"], {}, "not one of algo.reward_tokens"),
        ([0.5, 0.5, 0.5, 1.5], {}, "neither the text of a token nor a probability"),
        ([0.5] * 4, {"names": ("+", "-", "0")}, "need two algo.reward_tokens"),
        ([0.5] * 4, {"names": None}, "need two algo.reward_tokens"),
        (["hello the"] * 4, {"names": None}, "not one token"),
        ("++-+", {}, "is not a list"),
    ],
)
def test_labels_that_do_not_fit_are_bad_rows(tokenizer, labels, options, reason):
    with pytest.raises(RowError, match=reason):
        encode(tokenizer, labels, **options)


def test_a_placeholder_of_several_tokens_is_refused(tokenizer):
    with pytest.raises(UserError, match=r"algo\.placeholder_token: 'step done' is \d+ tokens"):
        StepEncoder(tokenizer, DataConfig.of("prm"), AlgoConfig.of("prm", placeholder_token="step done"))
