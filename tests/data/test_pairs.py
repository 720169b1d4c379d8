"""Pairs: two sequences with one prompt stay together, and are dropped if they are the same."""

from __future__ import annotations

import pytest

from rlhf_suite.config.declarations.data import DataConfig
from rlhf_suite.data.batch import Group
from rlhf_suite.data.encode import encode_rows
from rlhf_suite.data.preferences import PairEncoder
from rlhf_suite.data.row import BadRows, Row, RowError


def encode(tokenizer, values, margin_key=None, **config):
    return PairEncoder(
        tokenizer, DataConfig.of("dpo", **{"input_template": "User: {}\nAssistant: "} | config), margin_key
    ).encode(Row(values, "set.jsonl", 7))


def parts(tokenizer, example):
    """Text that is not trained on, and text that is."""
    split = example.mask.index(1)
    assert example.mask == [0] * split + [1] * (len(example) - split)
    return tokenizer.decode(example.ids[:split]), tokenizer.decode(example.ids[split:])


def test_a_prompt_column_comes_before_both_responses(tokenizer):
    values = {"prompt": "what is the capital?", "chosen": "Paris.", "rejected": "hello"}
    pair = encode(tokenizer, values, prompt_key="prompt", input_template="User: {}\n")
    assert [parts(tokenizer, example) for example in pair.examples] == [
        ("User: what is the capital?\n", "Paris.<|im_end|>"),
        ("User: what is the capital?\n", "hello<|im_end|>"),
    ]
    assert len(pair) == sum(map(len, pair.examples)) and pair.where == "set.jsonl:7"


@pytest.mark.notices(
    "the common beginning of a pair ends within a word",
    "data/preferences.py",
    "while common and not common[-1].isspace():",
    "while False:",
)
def test_without_a_prompt_column_the_common_words_are_the_prompt(tokenizer):
    values = {"chosen": "the user asks: today is fine", "rejected": "the user asks: tomorrow"}
    pair = encode(tokenizer, values)
    assert [parts(tokenizer, example) for example in pair.examples] == [
        ("the user asks:", " today is fine<|im_end|>"),
        ("the user asks:", " tomorrow<|im_end|>"),
    ]
    with pytest.raises(RowError, match=r"no beginning in common.*data\.prompt_key"):
        encode(tokenizer, {"chosen": "yes", "rejected": "no"})


def test_conversations_end_with_their_response(tokenizer):
    question = {"role": "user", "content": "hello there"}
    values = {
        name: [question, {"role": "assistant", "content": text}]
        for name, text in (("chosen", "hi"), ("rejected", "no"))
    }
    pair = encode(tokenizer, values, apply_chat_template=True)
    assert [parts(tokenizer, example)[1] for example in pair.examples] == ["hi<|im_end|>", "no<|im_end|>"]


def test_pairs_that_are_equal_after_the_cut_are_dropped_and_counted(tokenizer):
    same = {"prompt": "hello", "chosen": "a b c", "rejected": "a b c"}
    long = {"prompt": "hello", "chosen": "a " * 50 + "x", "rejected": "a " * 50 + "y"}
    good = {"prompt": "hello", "chosen": "yes", "rejected": "no"}
    encoder = PairEncoder(tokenizer, DataConfig.of("dpo", prompt_key="prompt", input_template=None, max_len=16))
    bad = BadRows("skip")
    rows = [Row(values, "f", line) for line, values in enumerate((same, long, good))]
    encoded = list(encode_rows(encoder, rows, bad))
    assert len(encoded) == 1 and isinstance(encoded[0], Group)
    assert sorted(bad.left_out) == [
        "the chosen and the rejected response are the same",
        "the chosen and the rejected response are the same after the cut at data.max_len",
    ]


def test_a_margin_is_a_number_of_both_sequences(tokenizer):
    values = {"prompt": "hello", "chosen": "yes", "rejected": "no", "margin": "1.5"}
    pair = encode(tokenizer, values, margin_key="margin", prompt_key="prompt")
    assert [example.numbers for example in pair.examples] == [{"margin": 1.5}] * 2
    with pytest.raises(RowError, match="column 'margin' is not a number"):
        encode(tokenizer, values | {"margin": "big"}, margin_key="margin", prompt_key="prompt")


@pytest.mark.parametrize("key", ["chosen", "rejected"])
def test_an_empty_response_is_refused(tokenizer, key):
    values = {"prompt": "hello", "chosen": "yes", "rejected": "no"} | {key: " "}
    with pytest.raises(RowError, match=f"column '{key}' is empty"):
        encode(tokenizer, values, prompt_key="prompt")
