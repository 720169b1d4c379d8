"""Whole dialogues in one column of text, and prompts in several columns."""

from __future__ import annotations

import pytest

from rlhf_suite.config.declarations.data import DataConfig
from rlhf_suite.data.preferences import PairEncoder
from rlhf_suite.data.row import Row, RowError
from rlhf_suite.data.text_encoders import ConversationEncoder

MARKERS = ["Human:", "Assistant:"]
START = "\n\nHuman: hello there\n\nAssistant: hello user\n\nHuman: the user asks Human: what?\n\nAssistant:"


def row(**values):
    return Row(values, "set.jsonl", 7)


def parts(tokenizer, example):
    """Text that is not trained on, and text that is."""
    split = example.mask.index(1)
    assert example.mask == [0] * split + [1] * (len(example) - split)
    return tokenizer.decode(example.ids[:split]), tokenizer.decode(example.ids[split:])


@pytest.mark.notices(
    "the marker of the answer is no part of its prompt",
    "data/messages.py",
    "text[: last.end()], text[last.end() :].rstrip()",
    "text[: last.start()], text[last.end() :].rstrip()",
)
def test_the_last_turns_are_the_responses_of_a_pair(tokenizer):
    encoder = PairEncoder(tokenizer, DataConfig.of("dpo", turn_markers=MARKERS))
    pair = encoder.encode(row(chosen=f"{START} the capital\n", rejected=f"{START} the user"))
    assert [parts(tokenizer, example) for example in pair.examples] == [
        (START, " the capital<|im_end|>"),  # the words they have in common are part of both answers
        (START, " the user<|im_end|>"),
    ]


def test_a_dialogue_is_rendered_with_the_chat_template(tokenizer):
    config = DataConfig.of("sft", apply_chat_template=True, multiturn=True, turn_markers=MARKERS)
    example = ConversationEncoder(tokenizer, config).encode(row(input=f"{START} Paris."))
    assert tokenizer.decode(example.ids) == (
        "<|im_start|>user\nhello there<|im_end|>\n<|im_start|>assistant\nhello user<|im_end|>\n"
        "<|im_start|>user\nthe user asks Human: what?<|im_end|>\n<|im_start|>assistant\nParis.<|im_end|>"
    )
    trained = [token for token, is_trained in zip(example.ids, example.mask, strict=True) if is_trained]
    assert tokenizer.decode(trained) == "hello user<|im_end|>Paris.<|im_end|>"


@pytest.mark.notices(
    "an empty answer is trained on",
    "data/messages.py",
    '    if not message.get("tool_calls") and (',
    "    if False and (",
)
@pytest.mark.notices(
    "a dialogue may begin anywhere in a text",
    "data/messages.py",
    "    if not starts or starts[0].start() > 0:",
    "    if not starts:",
)
@pytest.mark.parametrize("chat", [True, False])
@pytest.mark.parametrize(
    ("chosen", "reason"),
    [
        ("Well. \nHuman: hello\nAssistant: yes", "does not begin with one of data.turn_markers"),
        ("hello", "does not begin with one of data.turn_markers"),
        (f"{START} ", "the response is empty"),
        ("Human: other\nAssistant: yes", "differ before their last responses"),
    ],
)
def test_dialogues_that_do_not_fit_are_bad_rows(tokenizer, chat, chosen, reason):
    encoder = PairEncoder(tokenizer, DataConfig.of("dpo", turn_markers=MARKERS, apply_chat_template=chat))
    with pytest.raises(RowError, match=reason):
        encoder.encode(row(chosen=chosen, rejected=f"{START} no"))


@pytest.mark.notices(
    "a dialogue that ends with the user has an answer",
    "data/messages.py",
    "    if last[1] != markers[1]:",
    "    if False:",
)
def test_a_dialogue_that_ends_with_the_user_is_a_bad_row(tokenizer):
    config = DataConfig.of("sft", turn_markers=MARKERS)
    with pytest.raises(RowError, match="the last turn of a dialogue does not begin with 'Assistant:'"):
        ConversationEncoder(tokenizer, config).encode(row(input="Human: a\nAssistant: b\nHuman: c"))


@pytest.mark.parametrize("chat", [True, False])
@pytest.mark.parametrize("blank", ["", " ", None])
def test_blank_columns_of_a_prompt_in_several_columns_are_skipped(tokenizer, chat, blank):
    config = DataConfig.of(
        "sft", input_key="task, given", output_key="out", apply_chat_template=chat, input_template="{}="
    )
    encoder = ConversationEncoder(tokenizer, config)
    both = encoder.encode(row(task="the task", given="the input", out="yes"))
    assert "the task\n\nthe input" in parts(tokenizer, both)[0]
    one = encoder.encode(row(task="the task", given=blank, out="yes"))
    alone = ConversationEncoder(
        tokenizer,
        DataConfig.of("sft", input_key="task", output_key="out", apply_chat_template=chat, input_template="{}="),
    )
    assert one == alone.encode(row(task="the task", out="yes"))


@pytest.mark.parametrize(
    ("values", "reason"),
    [
        ({"task": "a"}, "no column 'given'"),
        ({"task": " ", "given": None}, "column 'task,given' is empty"),
        ({"task": "a", "given": 3}, "column 'given' is of type int"),
    ],
)
def test_columns_that_cannot_be_joined_are_bad_rows(tokenizer, values, reason):
    encoder = ConversationEncoder(tokenizer, DataConfig.of("sft", input_key="task,given", output_key="out"))
    with pytest.raises(RowError, match=reason):
        encoder.encode(row(out="yes", **values))
