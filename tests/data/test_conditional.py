"""Prompts that contain the reward of their response."""

from __future__ import annotations

import pytest

from rlhf_suite.config.declarations.data import DataConfig, says_reward
from rlhf_suite.data.row import Row, RowError
from rlhf_suite.data.text_encoders import ConversationEncoder, PromptEncoder

ROW = {"input": "hello", "output": "yes", "reward": 4.756}


def text(tokenizer, values=ROW, **config):
    settings = {"reward_key": "reward", "output_key": "output", "input_template": "User: {}\nAssistant: "} | config
    example = ConversationEncoder(tokenizer, DataConfig.of("sft", **settings)).encode(Row(values, "f", 1))
    split = example.mask.index(1)
    return tokenizer.decode(example.ids[:split]), tokenizer.decode(example.ids[split:])


def test_the_reward_is_part_of_the_prompt(tokenizer):
    assert text(tokenizer) == ("User: hello <rm_score>: 4.76 \nAssistant: ", "yes<|im_end|>")
    assert text(tokenizer, reward_template="[{reward:.0f}] {prompt}")[0] == "User: [5] hello\nAssistant: "
    assert text(tokenizer, reward_key=None)[0] == "User: hello\nAssistant: "


@pytest.mark.notices(
    "the first question of a conversation carries the reward", "data/render.py", "place = max(", "place = min("
)
def test_in_a_chat_the_last_user_message_has_the_reward(tokenizer):
    asked = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}, {"role": "user", "content": "c"}]
    for given in ("c", asked):
        prompt, answer = text(tokenizer, ROW | {"input": given}, apply_chat_template=True)
        assert prompt.endswith("<|im_start|>user\nc <rm_score>: 4.76 <|im_end|>\n<|im_start|>assistant\n")
        assert answer == "yes<|im_end|>" and prompt.count("rm_score") == 1
    assert asked[-1]["content"] == "c"


@pytest.mark.parametrize("reward", [None, "good", "nan", float("inf")])
def test_a_row_without_a_reward_is_a_bad_row(tokenizer, reward):
    with pytest.raises(RowError, match="column 'reward'"):
        text(tokenizer, ROW | {"reward": reward})


def test_a_template_needs_the_prompt_and_the_reward():
    assert says_reward("{prompt} {reward:.1f}")
    for template in ("{prompt}", "{reward}", "{} {reward}", "{prompt} {reward", "{prompt} {score}"):
        assert not says_reward(template), template


@pytest.mark.parametrize("chat", [False, True])
def test_a_target_reward_gives_the_prompt_of_training_rows_with_that_reward(tokenizer, chat):
    template = None if chat else "User: {}\nAssistant: "
    shared = {"input_template": template, "apply_chat_template": chat, "reward_template": "{prompt} [{reward:.1f}]"}
    row = Row(ROW, "f", 1)
    learned = ConversationEncoder(tokenizer, DataConfig.of("sft", **shared, output_key="output", reward_key="reward"))
    asked = PromptEncoder(tokenizer, DataConfig.of("generate", **shared, target_reward=4.8))
    example = learned.encode(row)
    assert asked.encode(row).ids == example.ids[: example.mask.index(1)]
    assert "hello [4.8]" in asked.encode(row).text
    assert "[" not in PromptEncoder(tokenizer, DataConfig.of("generate", **shared)).encode(row).text
