"""The prompt of a conversation: its turns in the template, without the oldest turns if there is no room for all."""

from __future__ import annotations

import json

import pytest

from rlhf_suite.config.declarations.data import DataConfig
from rlhf_suite.data.conversation import Conversation
from rlhf_suite.data.row import Row, RowError
from rlhf_suite.data.text_encoders import ConversationEncoder
from rlhf_suite.models.builtin import byte_tokenizer

PLAIN = DataConfig.of("chat", apply_chat_template=False)
NO_SYSTEM = "{% if messages[0]['role'] == 'system' %}{{ raise_exception('no system') }}{% endif %}{{ messages|length }}"


@pytest.fixture
def tokenizer():
    return byte_tokenizer()


def with_turns(tokenizer, room=10_000, config=PLAIN, system="Be brief."):
    talk = Conversation(tokenizer, config, room)
    talk.set_system(system)
    for question, answer in (("one", "1"), ("two", "2")):
        talk.add_message(question)
        talk.add_response(answer)
    return talk


def test_without_a_chat_template_turns_follow_each_other_in_the_input_template(tokenizer):
    ids, dropped = with_turns(tokenizer).add_message("three")
    text = "Be brief.\nUser: one\nAssistant: 1\nUser: two\nAssistant: 2\nUser: three\nAssistant: "
    assert (tokenizer.decode(ids), dropped) == (text, 0)


def test_a_tokenizers_chat_template_is_used_where_there_is_one(tokenizer):
    talk = with_turns(tokenizer, config=DataConfig.of("chat"))
    ids, _ = talk.add_message("three")
    assert ids == tokenizer.apply_chat_template(talk.messages, add_generation_prompt=True)["input_ids"]
    assert [message["content"] for message in talk.messages] == ["Be brief.", "one", "1", "two", "2", "three"]
    tokenizer.chat_template = None
    ids, _ = Conversation(tokenizer, DataConfig.of("chat"), 100).add_message("one")
    assert tokenizer.decode(ids) == "User: one\nAssistant: "


def test_the_last_message_asks_for_a_reward_and_what_is_saved_does_not(tokenizer):
    """As in a row of training: the reward is in the last user message alone."""
    config = DataConfig.of(
        "chat", apply_chat_template=False, target_reward=4.0, reward_template="{prompt} [{reward:.1f}]"
    )
    talk = with_turns(tokenizer, config=config)
    ids, _ = talk.add_message("three")
    text = "Be brief.\nUser: one\nAssistant: 1\nUser: two\nAssistant: 2\nUser: three [4.0]\nAssistant: "
    assert tokenizer.decode(ids) == text and talk.turns[-1]["content"] == "three"
    templated = with_turns(tokenizer, config=DataConfig.of("chat", target_reward=4.0))
    ids, _ = templated.add_message("three")
    asked = [*templated.messages[:-1], {"role": "user", "content": "three <rm_score>: 4.00 "}]
    assert ids == tokenizer.apply_chat_template(asked, add_generation_prompt=True)["input_ids"]


@pytest.mark.notices(
    "one message of the oldest turn is dropped for room, not both",
    "data/conversation.py",
    "turns, dropped = turns[2:], dropped + 1",
    "turns, dropped = turns[1:], dropped + 1",
)
@pytest.mark.parametrize(("spared", "dropped"), [(0, 0), (1, 1), (len("User: one\nAssistant: 1\n") + 1, 2)])
def test_the_oldest_turns_are_dropped_to_make_room_but_never_the_system_message(tokenizer, spared, dropped):
    whole = len(with_turns(tokenizer).add_message("three")[0])
    talk = with_turns(tokenizer)
    talk.max_prompt_tokens = whole - spared
    ids, found = talk.add_message("three")
    assert found == dropped and len(ids) <= talk.max_prompt_tokens
    kept = ["one", "1", "two", "2", "three"][2 * dropped :]
    assert [message["content"] for message in talk.messages] == ["Be brief.", *kept]


def test_a_message_that_does_not_fit_alone_changes_nothing(tokenizer):
    talk = with_turns(tokenizer, room=100)
    before = talk.messages
    with pytest.raises(
        RowError, match=r"has 230 tokens .*; at most 100 are possible \(chat\.max_len - chat\.max_new_tokens\)"
    ):
        talk.add_message("x" * 202)
    assert talk.messages == before


def test_a_system_message_that_the_template_rejects_does_not_replace_the_present_one(tokenizer):
    tokenizer.chat_template = NO_SYSTEM
    talk = Conversation(tokenizer, DataConfig.of("chat"), 100)
    with pytest.raises(RowError, match="no system"):
        talk.set_system("Be brief.")
    assert talk.system is None and talk.add_message("one")[1] == 0


def test_reset_forgets_the_turns_and_saved_rows_are_message_lists(tokenizer, tmp_path):
    talk = with_turns(tokenizer)
    talk.add_message("thrée")
    talk.remove_message()
    talk.save(tmp_path / "a.jsonl")
    talk.reset()
    talk.save(tmp_path / "a.jsonl")
    rows = [json.loads(line)["messages"] for line in (tmp_path / "a.jsonl").read_text().splitlines()]
    assert [message["content"] for message in rows[0]] == ["Be brief.", "one", "1", "two", "2"]
    assert rows[1] == [{"role": "system", "content": "Be brief."}]


def test_a_saved_conversation_is_a_row_to_train_on(tokenizer, tmp_path):
    with_turns(tokenizer).save(tmp_path / "a.jsonl")
    row = Row(json.loads((tmp_path / "a.jsonl").read_text()), "a.jsonl", 1)
    config = DataConfig.of("sft", input_key="messages", apply_chat_template=True, multiturn=True)
    example = ConversationEncoder(tokenizer, config).encode(row)
    trained = [token for token, is_trained in zip(example.ids, example.mask, strict=True) if is_trained]
    assert tokenizer.decode(trained) == "1<|im_end|>2<|im_end|>"
