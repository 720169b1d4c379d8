"""What a run says at its start about flags that are probably not meant."""

from __future__ import annotations

from rlhf_suite.config.data import RenderConfig
from rlhf_suite.models.builtin import byte_tokenizer
from rlhf_suite.train.notices import batch_notices, chat_template_notices


def test_a_chat_template_that_is_not_used_is_said():
    tokenizer = byte_tokenizer()
    assert not list(chat_template_notices(tokenizer, RenderConfig(), "builtin:tiny"))
    tokenizer.chat_template = "{% for m in messages %}<|user|>{{ m.content }}{% endfor %}"
    (said,) = chat_template_notices(tokenizer, RenderConfig(), "models/chat")
    assert "models/chat has a chat template" in said and "add data.apply_chat_template=true" in said
    assert not list(chat_template_notices(tokenizer, RenderConfig(apply_chat_template=True), "models/chat"))
    tokenizer.chat_template = None
    assert not list(chat_template_notices(tokenizer, RenderConfig(), "models/base"))


def test_a_batch_that_is_larger_than_the_data_is_said():
    (said,) = batch_notices("rollout.batch_size", 1024, 300, "prompts")
    assert said == "rollout.batch_size=1024 is larger than the data: each step takes all 300 prompts"
    assert not list(batch_notices("rollout.batch_size", 300, 300, "prompts"))
