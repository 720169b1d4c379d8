"""Conversations to ids: exactly the model's own tokens are trained on, and prompts are those of inference."""

from __future__ import annotations

import pytest

from rlhf_suite.config.declarations.data import DataConfig
from rlhf_suite.data.encode import encode_rows
from rlhf_suite.data.messages import UNNAMED
from rlhf_suite.data.row import BadRows, Row, RowError
from rlhf_suite.data.text_encoders import ConversationEncoder, PromptEncoder
from rlhf_suite.errors import UserError


def row(**values) -> Row:
    return Row(values, "set.jsonl", 7)


def user(text):
    return {"role": "user", "content": text}


def assistant(text, **extra):
    return {"role": "assistant", "content": text, **extra}


def chat_config(**values) -> DataConfig:
    return DataConfig.of("sft", **{"apply_chat_template": True, **values})


def plain_config(**values) -> DataConfig:
    return DataConfig.of("sft", **{"output_key": "output", **values})


def trained_pieces(tokenizer, example) -> list[str]:
    """The text of each run of trained tokens."""
    runs, previous = [], 0
    for token, mask in zip(example.ids, example.mask, strict=True):
        if mask and not previous:
            runs.append([])
        if mask:
            runs[-1].append(token)
        previous = mask
    return [tokenizer.decode(run) for run in runs]


CHAT = [user("hello there"), assistant("hello user"), user("what is the capital?"), assistant("Paris.")]


@pytest.mark.notices(
    "what a user says in a conversation is trained on",
    "data/text_encoders.py",
    "Segment(turn.prompt[done:], False,",
    "Segment(turn.prompt[done:], True,",
)
def test_the_last_turn_is_trained_on_with_its_end_token(tokenizer):
    example = ConversationEncoder(tokenizer, chat_config()).encode(row(input=CHAT))
    assert trained_pieces(tokenizer, example) == ["Paris.<|im_end|>"]
    assert tokenizer.decode(example.ids) == (
        "<|im_start|>user\nhello there<|im_end|>\n<|im_start|>assistant\nhello user<|im_end|>\n"
        "<|im_start|>user\nwhat is the capital?<|im_end|>\n<|im_start|>assistant\nParis.<|im_end|>"
    )
    assert example.where == "set.jsonl:7" and not example.truncated


@pytest.mark.parametrize(
    ("given", "output"),
    [
        ("what is it?", "Paris."),
        ([user("what is it?")], "Paris."),
        ("what is it?", [assistant("Paris.")]),
        ([user("what is it?")], [assistant("Paris.")]),
    ],
)
def test_input_and_output_may_be_text_or_message_lists(tokenizer, given, output):
    encoder = ConversationEncoder(tokenizer, chat_config(output_key="output"))
    example = encoder.encode(row(input=given, output=output))
    expected = ConversationEncoder(tokenizer, chat_config()).encode(
        row(input=[user("what is it?"), assistant("Paris.")])
    )
    assert (example.ids, example.mask) == (expected.ids, expected.mask)


@pytest.mark.notices(
    "the end of an answer is not trained on", "data/text_encoders.py", "mask.append(1)", "mask.append(0)"
)
@pytest.mark.parametrize("answer", ["you", "\n\n there", "Paris.", " n", "<|im_start|>odd"])
@pytest.mark.parametrize("chat", [True, False])
def test_the_prompt_ids_are_those_of_the_prompt_tokenised_alone(tokenizer, answer, chat):
    """Whatever the answer begins with, no token spans the border."""
    if chat:
        prompt = tokenizer.apply_chat_template([user("hello")], tokenize=False, add_generation_prompt=True)
        config = chat_config(output_key="output")
    else:
        prompt = "User: hello\nAssistant: "
        config = plain_config()
    example = ConversationEncoder(tokenizer, config).encode(row(input="hello", output=answer))
    alone = tokenizer(prompt, add_special_tokens=False)["input_ids"]
    assert example.ids[: len(alone)] == alone
    assert example.mask == [0] * len(alone) + [1] * (len(example.ids) - len(alone))
    assert tokenizer.decode(example.ids[len(alone) :]) == answer + "<|im_end|>"


def test_a_merge_across_the_border_is_not_made(tokenizer):
    """The premise of the test above: tokenised in one piece, the border would move."""
    whole = tokenizer("User: hello\nAssistant: " + "you", add_special_tokens=False)["input_ids"]
    parts = [tokenizer(text, add_special_tokens=False)["input_ids"] for text in ("User: hello\nAssistant: ", "you")]
    assert whole != parts[0] + parts[1]


def test_multiturn_trains_on_every_assistant_turn(tokenizer):
    example = ConversationEncoder(tokenizer, chat_config(multiturn=True)).encode(row(input=CHAT))
    assert trained_pieces(tokenizer, example) == ["hello user<|im_end|>", "Paris.<|im_end|>"]
    full = tokenizer.apply_chat_template(CHAT, tokenize=False)
    assert tokenizer.decode(example.ids) == full.removesuffix("\n")


def test_multiturn_trains_on_no_tool_or_system_turn_and_ends_at_the_last_response(tokenizer):
    chat = [
        {"role": "system", "content": "be kind"},
        *CHAT[:2],
        {"role": "tool", "content": "4"},
        assistant("the answer is 4"),
        user("thanks"),
    ]
    example = ConversationEncoder(tokenizer, chat_config(multiturn=True)).encode(row(input=chat))
    assert trained_pieces(tokenizer, example) == ["hello user<|im_end|>", "the answer is 4<|im_end|>"]
    assert tokenizer.decode(example.ids).endswith("the answer is 4<|im_end|>")


def test_multiturn_appends_the_output_column(tokenizer):
    encoder = ConversationEncoder(tokenizer, chat_config(multiturn=True, output_key="output"))
    example = encoder.encode(row(input=CHAT[:3], output="Paris."))
    assert trained_pieces(tokenizer, example) == ["hello user<|im_end|>", "Paris.<|im_end|>"]


DROPS_HISTORY = (  # like templates that drop the reasoning of earlier turns
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{% if message['role'] == 'assistant' and not loop.last %}...{% else %}{{ message['content'] }}{% endif %}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
CHANGES_PROMPT = (  # the rendering of a finished conversation begins differently
    "{% if add_generation_prompt %}ask: {% endif %}{% for message in messages %}{{ message['content'] }}\n{% endfor %}"
)


def test_a_template_that_rewrites_earlier_turns_gives_one_example_per_response(tokenizer):
    tokenizer.chat_template = DROPS_HISTORY
    examples = ConversationEncoder(tokenizer, chat_config(multiturn=True)).encode(row(input=CHAT))
    assert [trained_pieces(tokenizer, each) for each in examples] == [["hello user<|im_end|>"], ["Paris.<|im_end|>"]]
    assert "assistant\n...<|im_end|>" in tokenizer.decode(examples[1].ids)


def test_the_last_turn_alone_may_use_such_a_template(tokenizer):
    tokenizer.chat_template = DROPS_HISTORY
    example = ConversationEncoder(tokenizer, chat_config()).encode(row(input=CHAT))
    assert trained_pieces(tokenizer, example) == ["Paris.<|im_end|>"]
    assert "assistant\n...<|im_end|>" in tokenizer.decode(example.ids)


def test_a_response_is_rendered_as_at_its_own_turn_whatever_follows(tokenizer):
    tokenizer.chat_template = DROPS_HISTORY
    example = ConversationEncoder(tokenizer, chat_config(multiturn=True)).encode(row(input=[*CHAT[:2], user("thanks")]))
    assert trained_pieces(tokenizer, example) == ["hello user<|im_end|>"]


def test_a_response_comes_after_the_prompt_of_inference(tokenizer):
    tokenizer.chat_template = CHANGES_PROMPT
    example = ConversationEncoder(tokenizer, chat_config()).encode(row(input=CHAT))
    assert tokenizer.decode(example.ids).startswith("ask: hello there\nhello user\nwhat is the capital?\n")
    assert trained_pieces(tokenizer, example) == ["Paris.\n<|im_end|>"]


def test_a_template_without_the_text_of_the_response_is_refused(tokenizer):
    tokenizer.chat_template = "{{ messages[0]['content'] }}{% if add_generation_prompt %} assistant: {% endif %}"
    with pytest.raises(RowError, match="the chat template does not render the text of the response"):
        ConversationEncoder(tokenizer, chat_config()).encode(row(input=CHAT))


def test_a_template_error_is_a_row_error(tokenizer):
    tokenizer.chat_template = "{{ raise_exception('roles must alternate') }}"
    with pytest.raises(RowError, match="roles must alternate"):
        ConversationEncoder(tokenizer, chat_config()).encode(row(input=CHAT))


def test_a_prompt_that_renders_to_nothing_is_refused(tokenizer):
    tokenizer.chat_template = "{% if not add_generation_prompt %}{{ messages[-1]['content'] }}{% endif %}"
    with pytest.raises(RowError, match="the prompt has no tokens"):
        ConversationEncoder(tokenizer, chat_config()).encode(row(input=CHAT))


def test_an_end_token_is_appended_where_the_template_has_none(tokenizer):
    tokenizer.chat_template = (
        "{% for message in messages %}{{ message['role'] }}: {{ message['content'] }}\n{% endfor %}"
        "{% if add_generation_prompt %}assistant: {% endif %}"
    )
    example = ConversationEncoder(tokenizer, chat_config(multiturn=True)).encode(row(input=CHAT))
    assert trained_pieces(tokenizer, example) == ["hello user\n", "Paris.\n<|im_end|>"]


def test_plain_text_gets_one_end_token_and_no_space(tokenizer):
    encoder = ConversationEncoder(tokenizer, plain_config())
    example = encoder.encode(row(input="hello", output="Paris."))
    assert trained_pieces(tokenizer, example) == ["Paris.<|im_end|>"]
    written = encoder.encode(row(input="hello", output="Paris.<|im_end|>"))
    assert (written.ids, written.mask) == (example.ids, example.mask)


def test_plain_text_uses_the_input_template_even_with_braces_in_the_prompt(tokenizer):
    encoder = ConversationEncoder(tokenizer, plain_config(input_template="Q: {}\nA: "))
    assert tokenizer.decode(encoder.encode(row(input="{x} {}", output="y")).ids) == "Q: {x} {}\nA: y<|im_end|>"
    encoder = ConversationEncoder(tokenizer, plain_config(input_template=None))
    assert tokenizer.decode(encoder.encode(row(input="1+1=", output="2")).ids) == "1+1=2<|im_end|>"


def test_a_begin_token_is_kept_for_plain_text_and_not_doubled_in_chats(bos_tokenizer):
    begin = bos_tokenizer.bos_token_id
    plain = ConversationEncoder(bos_tokenizer, plain_config()).encode(row(input="hello", output="Paris."))
    assert plain.ids[0] == begin and plain.mask[0] == 0 and plain.ids.count(begin) == 1
    template = ConversationEncoder(bos_tokenizer, plain_config(input_template="<s>{}"))
    assert template.encode(row(input="hello", output="Paris.")).ids.count(begin) == 1
    chat = ConversationEncoder(bos_tokenizer, chat_config()).encode(row(input=CHAT))
    assert begin not in chat.ids


@pytest.mark.notices(
    "an answer that is cut off gets an end",
    "data/text_encoders.py",
    "ids=example.ids[:max_len]",
    "ids=[*example.ids[: max_len - 1], example.ids[-1]]",
)
def test_a_long_sample_is_cut_at_the_right_without_an_end_token(tokenizer):
    whole = ConversationEncoder(tokenizer, plain_config()).encode(row(input="hello", output="one two three " * 5))
    limit = len(whole.ids) - 10
    example = ConversationEncoder(tokenizer, plain_config(max_len=limit)).encode(
        row(input="hello", output="one two three " * 5)
    )
    assert example.ids == whole.ids[:limit] and example.mask == whole.mask[:limit] and example.truncated
    assert tokenizer.eos_token_id not in example.ids


def test_a_sample_of_exactly_max_len_is_whole(tokenizer):
    whole = ConversationEncoder(tokenizer, plain_config()).encode(row(input="hello", output="Paris."))
    exact = ConversationEncoder(tokenizer, plain_config(max_len=len(whole.ids))).encode(
        row(input="hello", output="Paris.")
    )
    assert exact.ids == whole.ids and not exact.truncated


def test_a_prompt_needs_room_for_two_tokens_of_response(tokenizer):
    prompt = len(tokenizer("User: hello\nAssistant: ", add_special_tokens=False)["input_ids"])
    example = ConversationEncoder(tokenizer, plain_config(max_len=prompt + 2)).encode(
        row(input="hello", output="9 9 9")
    )
    assert sum(example.mask) == 2
    with pytest.raises(RowError, match=rf"no room for a response in data\.max_len={prompt + 1}"):
        ConversationEncoder(tokenizer, plain_config(max_len=prompt + 1)).encode(row(input="hello", output="9 9 9"))


@pytest.mark.parametrize(
    ("config", "values", "reason"),
    [
        (plain_config(), {"input": "a"}, "no column 'output'; columns: input"),
        (plain_config(), {"input": "a", "output": None}, "column 'output' is null"),
        (plain_config(), {"input": "a", "output": " \n"}, "column 'output' is empty"),
        (plain_config(), {"input": "", "output": "b"}, "column 'input' is empty"),
        (plain_config(), {"input": 3, "output": "b"}, "column 'input' is of type int, not text"),
        (plain_config(), {"input": [user("a")], "output": "b"}, "apply_chat_template=true"),
        (chat_config(), {"input": "a"}, "data.output_key"),
        (chat_config(), {"input": []}, "column 'input' is an empty list"),
        (chat_config(), {"input": {"role": "user"}}, "of type dict, not text or a message list"),
        (chat_config(), {"input": [user("a"), {"role": "assistant"}]}, "role and content are needed"),
        (chat_config(), {"input": ["a", "b"]}, "role and content are needed"),
        (chat_config(), {"input": [user("a"), user("b")]}, "message of role 'user'"),
        (chat_config(), {"input": [assistant("a")]}, "the prompt is empty"),
        (chat_config(), {"input": [user("a"), assistant(" ")]}, "the response is empty"),
        (
            chat_config(output_key="output"),
            {"input": "a", "output": [assistant("b"), user("c")]},
            "data.multiturn=true",
        ),
        (chat_config(multiturn=True), {"input": [user("a"), assistant(""), user("b"), assistant("c")]}, "is empty"),
        (chat_config(multiturn=True), {"input": [user("a")]}, "no assistant message"),
        (chat_config(multiturn=True), {"input": [assistant("a"), user("b")]}, "begins with an assistant"),
    ],
)
def test_a_row_that_cannot_be_used_has_a_reason(tokenizer, config, values, reason):
    with pytest.raises(RowError) as caught:
        ConversationEncoder(tokenizer, config).encode(row(**values))
    assert str(caught.value).startswith("set.jsonl:7: ") and reason in str(caught.value)


def test_an_assistant_message_with_only_tool_calls_is_a_response(tokenizer):
    tokenizer.chat_template = (
        "{% for message in messages %}{{ message['role'] }}: {{ message['content'] or message['tool_calls'] }}\n"
        "{% endfor %}{% if add_generation_prompt %}assistant: {% endif %}"
    )
    chat = [user("a"), assistant(None, tool_calls=[{"name": "add"}])]
    example = ConversationEncoder(tokenizer, chat_config()).encode(row(input=chat))
    assert trained_pieces(tokenizer, example) == ["[{'name': 'add'}]\n<|im_end|>"]


@pytest.mark.notices(
    "calls of tools that no prompt names are not said",
    "data/messages.py",
    "return (UNNAMED,) if not tools and any(",
    "return (UNNAMED,) if tools and any(",
)
@pytest.mark.parametrize("multiturn", [False, True])
def test_calls_of_tools_that_no_prompt_names_are_said_in_one_line(tokenizer, multiturn):
    """A model that is trained so learns to call what later prompts do not offer, or offer otherwise."""
    tokenizer.chat_template = (
        "{{ tools }}{% for message in messages %}{{ message['role'] }}: {{ message['content'] or "
        "message['tool_calls'] }}\n{% endfor %}{% if add_generation_prompt %}assistant: {% endif %}"
    )
    calls = assistant(None, tool_calls=[{"name": "add"}])
    rows = [
        row(input=[user("a"), calls, user("b"), calls]),
        row(input=[user("a"), calls], tools=[{"name": "add"}]),
        row(input=[user("a"), assistant("b")]),
    ]
    for key, count in ((None, 2), ("tools", 1)):
        bad = BadRows("stop")
        encoder = ConversationEncoder(tokenizer, chat_config(multiturn=multiturn, tools_key=key))
        assert len([*encode_rows(encoder, rows, bad)]) == 3
        assert bad.noted == {UNNAMED: count} and "data.tools_key" in bad.summary()
    prompts = PromptEncoder(tokenizer, DataConfig.of("ppo", apply_chat_template=True))
    assert prompts.encode(row(input=[user("a"), calls, user("b")])).notes == (UNNAMED,)
    assert prompts.encode(row(input=[user("a")])).notes == ()


def test_an_answer_that_is_not_named_is_refused_before_any_row(tokenizer):
    with pytest.raises(UserError, match=r"data\.output_key is not set"):
        ConversationEncoder(tokenizer, DataConfig.of("sft"))


def test_a_missing_chat_template_is_refused(tokenizer):
    tokenizer.chat_template = None
    with pytest.raises(UserError, match=r"set data\.tokenizer_chat_template"):
        ConversationEncoder(tokenizer, chat_config())
