"""Prompts to sample from: ids, label, data source; never cut."""

from __future__ import annotations

import json
from datetime import date

import pytest

from rlhf_suite.config.declarations.data import DataConfig
from rlhf_suite.data.row import Row, RowError
from rlhf_suite.data.text_encoders import ConversationEncoder, PromptEncoder


def row(**values) -> Row:
    return Row(values, "set.jsonl", 7)


def test_a_raw_prompt(tokenizer):
    prompt = PromptEncoder(tokenizer, DataConfig.of("ppo")).encode(row(input="reverse 4813 ="))
    assert prompt.ids == tokenizer("reverse 4813 =", add_special_tokens=False)["input_ids"]
    assert (prompt.text, prompt.label, prompt.datasource, prompt.where) == (
        "reverse 4813 =",
        "",
        "default",
        "set.jsonl:7",
    )


@pytest.mark.parametrize("given", ["hello", [{"role": "user", "content": "hello"}]])
def test_a_chat_prompt_ends_with_the_generation_prompt(tokenizer, given):
    prompt = PromptEncoder(tokenizer, DataConfig.of("ppo", apply_chat_template=True)).encode(row(input=given))
    assert prompt.text == "<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n"
    assert tokenizer.decode(prompt.ids) == prompt.text


@pytest.mark.parametrize("chat", [True, False])
def test_the_prompt_is_that_of_supervised_tuning(bos_tokenizer, chat):
    template = "User: {}\nAssistant: "
    tuned = ConversationEncoder(
        bos_tokenizer, DataConfig.of("sft", apply_chat_template=chat, output_key="output", input_template=template)
    ).encode(row(input="hello", output=" there"))
    prompt = PromptEncoder(
        bos_tokenizer, DataConfig.of("ppo", apply_chat_template=chat, input_template=template)
    ).encode(row(input="hello"))
    assert tuned.ids[: len(prompt.ids)] == prompt.ids
    assert tuned.mask.index(1) == len(prompt.ids)


@pytest.mark.notices(
    "a label of true becomes True",
    "data/render.py",
    "isinstance(value, bool | dict | list)",
    "isinstance(value, dict | list)",
)
@pytest.mark.parametrize(
    ("label", "text"),
    [("3184", "3184"), (7, "7"), (0.5, "0.5"), (True, "true"), (["é", 1], '["é", 1]'), ({"a": None}, '{"a": null}')],
)
def test_labels_become_text(tokenizer, label, text):
    encoder = PromptEncoder(tokenizer, DataConfig.of("ppo", label_key="answer"))
    assert encoder.encode(row(input="a", answer=label)).label == text


@pytest.mark.notices(
    "every prompt has the default data source",
    "data/text_encoders.py",
    '"default" if source is None else str(source)',
    '"default"',
)
def test_the_datasource_column_is_kept(tokenizer):
    encoder = PromptEncoder(tokenizer, DataConfig.of("ppo"))
    assert encoder.encode(row(input="a", datasource="gsm8k")).datasource == "gsm8k"
    assert encoder.encode(row(input="a", datasource=None)).datasource == "default"


@pytest.mark.notices(
    "a prompt may fill data.max_len",
    "data/text_encoders.py",
    "if len(ids) >= self.config.max_len:",
    "if len(ids) > self.config.max_len:",
)
def test_a_prompt_without_room_for_one_token_is_refused_and_never_cut(tokenizer):
    length = len(tokenizer("one two three", add_special_tokens=False)["input_ids"])
    assert len(
        PromptEncoder(tokenizer, DataConfig.of("ppo", max_len=length + 1)).encode(row(input="one two three")).ids
    ) == (length)
    with pytest.raises(RowError, match=rf"data\.max_len={length}"):
        PromptEncoder(tokenizer, DataConfig.of("ppo", max_len=length)).encode(row(input="one two three"))


def test_a_missing_label_and_an_answered_prompt_are_refused(tokenizer):
    with pytest.raises(RowError, match="no column 'answer'; columns: input"):
        PromptEncoder(tokenizer, DataConfig.of("ppo", label_key="answer")).encode(row(input="a"))
    chat = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    with pytest.raises(RowError, match="ends with an assistant message"):
        PromptEncoder(tokenizer, DataConfig.of("ppo", apply_chat_template=True)).encode(row(input=chat))


def test_further_columns_of_the_reward_are_json_values(tokenizer):
    encoder = PromptEncoder(tokenizer, DataConfig.of("ppo", reward_columns=["a", "b"]))
    values = {"a": {"é": [1, None, float("nan")]}, "b": None, "c": 1}
    assert json.loads(encoder.encode(row(input="x", **values)).columns) == {"a": {"é": [1, None, None]}, "b": None}
    assert json.loads(encoder.encode(row(input="x", a=date(2026, 5, 1), b=1)).columns) == {"a": "2026-05-01", "b": 1}
    assert PromptEncoder(tokenizer, DataConfig.of("ppo")).encode(row(input="x", **values)).columns == "{}"
    with pytest.raises(RowError, match="no column 'b'"):
        encoder.encode(row(input="x", a=1))


def test_a_chat_is_kept_for_agents_alone(tokenizer):
    config = DataConfig.of("ppo", apply_chat_template=True, tools_key="tools")
    given = row(input="hello", tools='[{"name": "add"}]')
    kept = PromptEncoder(tokenizer, config, keeps_chat=True).encode(given)
    assert json.loads(kept.chat) == {"messages": [{"role": "user", "content": "hello"}], "tools": [{"name": "add"}]}
    assert PromptEncoder(tokenizer, config).encode(given).chat == "{}"
    assert PromptEncoder(tokenizer, DataConfig.of("ppo"), keeps_chat=True).encode(row(input="hello")).chat == "{}"
