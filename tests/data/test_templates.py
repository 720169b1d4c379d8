"""Templates of widely used models: each response is trained on after exactly the prompt of inference."""

from __future__ import annotations

import json

import pytest
from templates import LLAMA3, MISTRAL, QWEN3, R1

from rlhf_suite.config.declarations.algo import AlgoConfig
from rlhf_suite.config.declarations.data import DataConfig
from rlhf_suite.data.encode import encode_rows
from rlhf_suite.data.preferences import LabelledEncoder, PairEncoder
from rlhf_suite.data.row import BadRows, Row, RowError
from rlhf_suite.data.steps import StepEncoder
from rlhf_suite.data.template import APPENDED, CLOSED, NO_REASONING
from rlhf_suite.data.text_encoders import ConversationEncoder, PromptEncoder

END = "<|im_end|>"
SYSTEM = {"role": "system", "content": "be kind"}


def user(text):
    return {"role": "user", "content": text}


def assistant(text, **extra):
    return {"role": "assistant", "content": text, **extra}


def call(name, arguments):
    return {"type": "function", "function": {"name": name, "arguments": arguments}}


PLAIN = [user("hello there"), assistant("hello user"), user("the capital?"), assistant("Paris.")]
SUM = "<think>\nadd\n</think>\n\n2"
THOUGHT = [
    user("hello"),
    assistant("<think>\na user\n</think>\n\nhi"),
    user("1+1?"),
    assistant(SUM),
]
TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]
WITH_TOOLS = [
    SYSTEM,
    user("what is 1+1?"),
    {"role": "assistant", "tool_calls": [call("add", {"a": 1, "b": 1})]},
    {"role": "tool", "content": "2"},
    assistant("It is 2."),
    user("thanks"),
    assistant("You are welcome."),
]


def encode(tokenizer, template, messages, multiturn=True, **config):
    """The examples of a conversation."""
    tokenizer.chat_template = template
    values = {"messages": messages, "tools": config.pop("tools", None)}
    config = DataConfig.of(
        "sft", input_key="messages", apply_chat_template=True, multiturn=multiturn, tools_key="tools", **config
    )
    made = ConversationEncoder(tokenizer, config).encode(Row(values, "set.jsonl", 7))
    return made if isinstance(made, list) else [made]


def runs(tokenizer, example):
    """(text before, text) of each run of trained tokens."""
    starts = [i for i, on in enumerate(example.mask) if on and not example.mask[i - 1]]
    stops = [i for i, on in enumerate(example.mask) if not on and i and example.mask[i - 1]] + [len(example.ids)]
    return [
        (tokenizer.decode(example.ids[:start]), tokenizer.decode(example.ids[start:stop]))
        for start, stop in zip(starts, stops, strict=False)
    ]


def asked(tokenizer, messages, tools=None, **variables):
    """What a model is asked with before each of its answers."""
    places = [place for place, message in enumerate(messages) if message["role"] == "assistant"]
    return [
        tokenizer.apply_chat_template(
            messages[:place], tools=tools, tokenize=False, add_generation_prompt=True, **variables
        )
        for place in places
    ]


CASES = {
    "qwen3": (QWEN3, PLAIN, None, 2, ["<think>\n\n</think>\n\nhello user", "<think>\n\n</think>\n\nParis."]),
    "qwen3 with reasoning": (
        QWEN3, THOUGHT, None, 2, ["<think>\na user\n</think>\n\nhi", "<think>\nadd\n</think>\n\n2"]
    ),
    "qwen3 with tools": (
        QWEN3, WITH_TOOLS, TOOLS, 3,
        ['<think>\n\n</think>\n\n<call>{"name": "add", "arguments": {"a": 1, "b": 1}}</call>',
         "<think>\n\n</think>\n\nIt is 2.", "<think>\n\n</think>\n\nYou are welcome."],
    ),
    "r1": (R1, PLAIN, None, 2, ["\n</think>\n\nhello user", "\n</think>\n\nParis."]),
    "r1 with reasoning": (R1, THOUGHT, None, 2, ["a user\n</think>\n\nhi", "add\n</think>\n\n2"]),
    "llama3": (LLAMA3, PLAIN, None, 1, ["hello user<|eot|>", "Paris.<|eot|>"]),
    "llama3 with tools": (
        LLAMA3, WITH_TOOLS, TOOLS, 1,
        ['{"name": "add", "parameters": {"a": 1, "b": 1}}<|eot|>', "It is 2.<|eot|>", "You are welcome.<|eot|>"],
    ),
    "mistral": (MISTRAL, PLAIN, None, 1, [" hello user", " Paris."]),
    "mistral with a system prompt": (MISTRAL, [SYSTEM, *PLAIN], None, 2, [" hello user", " Paris."]),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_every_response_is_trained_on_after_the_prompt_of_inference(tokenizer, case):
    template, messages, tools, num_examples, answers = CASES[case]
    examples = encode(tokenizer, template, messages, tools=tools)
    found = [run for example in examples for run in runs(tokenizer, example)]
    assert len(examples) == num_examples
    assert [before for before, _ in found] == asked(tokenizer, messages, tools)
    # the last answer of an example ends with the end-of-sequence token; an end of the template's own stays before it
    assert [answer.removesuffix(END) for _, answer in found] == answers
    assert all(example.ids[-1] == tokenizer.eos_token_id and example.mask[-1] for example in examples)


@pytest.mark.parametrize("case", CASES)
def test_the_last_response_alone_is_trained_on_after_the_same_prompt(tokenizer, case):
    template, messages, tools, _, answers = CASES[case]
    (example,) = encode(tokenizer, template, messages, multiturn=False, tools=tools)
    ((before, answer),) = runs(tokenizer, example)
    assert before == asked(tokenizer, messages, tools)[-1] and answer.removesuffix(END) == answers[-1]
    alone = tokenizer(before, add_special_tokens=False)["input_ids"]
    assert example.ids[: len(alone)] == alone and example.mask == [0] * len(alone) + [1] * (len(example) - len(alone))


def test_each_difference_from_the_row_is_noted_once_per_row(tokenizer):
    tokenizer.chat_template = R1
    encoder = ConversationEncoder(tokenizer, DataConfig.of("sft", apply_chat_template=True, multiturn=True))
    bad = BadRows("skip")
    rows = [Row({"input": chat}, "f", line) for line, chat in enumerate((PLAIN, THOUGHT, PLAIN[:2]), start=1)]
    assert len(list(encode_rows(encoder, rows, bad))) == 5
    assert {reason.partition(":")[0]: count for reason, count in bad.noted.items()} == {
        "one example per response": 2,
        "a response appended to the generation prompt as a model writes it": 3,
        "an empty reasoning part": 2,
    }
    assert bad.count == 0 and bad.rows == 3


def test_a_template_that_only_appends_gives_one_example_without_notes(tokenizer):
    (example,) = encode(tokenizer, LLAMA3, PLAIN)
    assert example.notes == ()


def test_variables_of_the_template_are_given_to_it(tokenizer):
    plain = [*PLAIN[:3], assistant("Paris.")]
    examples = encode(tokenizer, QWEN3, plain, chat_template_kwargs=["enable_thinking:false"])
    befores = [run[0] for example in examples for run in runs(tokenizer, example)]
    assert befores == asked(tokenizer, plain, enable_thinking=False) and befores[0].endswith("</think>\n\n")
    assert [run[1] for example in examples for run in runs(tokenizer, example)] == [f"hello user{END}", f"Paris.{END}"]
    with pytest.raises(
        RowError, match="the response has reasoning, but the generation prompt closes the reasoning part"
    ):
        encode(tokenizer, QWEN3, THOUGHT, chat_template_kwargs=["enable_thinking:false"])
    (example,) = encode(tokenizer, LLAMA3, PLAIN, chat_template_kwargs=["date_string:1 May 2026"])
    assert "Today: 1 May 2026\n" in tokenizer.decode(example.ids)


def test_reasoning_beside_the_content_is_trained_on(tokenizer):
    chat = [user("1+1?"), assistant("2", reasoning_content="add them")]
    for template, answer in ((QWEN3, "<think>\nadd them\n</think>\n\n2"), (R1, "add them\n</think>\n\n2")):
        (example,) = encode(tokenizer, template, chat)
        assert runs(tokenizer, example)[0][1] == answer + END
    (example,) = encode(tokenizer, LLAMA3, chat)
    assert example.notes == ("reasoning_content dropped: the chat template does not render it",)


def test_reasoning_that_a_template_cuts_off_is_still_trained_on(tokenizer):
    template = R1.replace("<think>\\n", "")  # the generation prompt opens nothing
    (example,) = encode(tokenizer, template, THOUGHT[2:])
    assert runs(tokenizer, example) == [("<User>1+1?<Assistant>", f"<think>\nadd\n</think>\n\n2{END}")]


def test_a_template_that_renders_the_opened_reasoning_continues_it(tokenizer):
    template = QWEN3.replace(
        "<|im_start|>assistant\\n' }}\n{%- if enable", "<|im_start|>assistant\\n<think>\\n' }}\n{%- if enable"
    )
    examples = encode(tokenizer, template, THOUGHT)
    assert [run[1] for each in examples for run in runs(tokenizer, each)] == [
        f"a user\n</think>\n\nhi{END}", f"add\n</think>\n\n2{END}",
    ]  # fmt: skip
    assert not {APPENDED, CLOSED, NO_REASONING} & {note for each in examples for note in each.notes}


def test_responses_whose_prompts_do_not_fit_are_dropped_and_noted(tokenizer):
    long = [user("hello"), assistant("hi"), user("word " * 60), assistant("2"), user("and?"), assistant("3")]
    (example,) = encode(tokenizer, R1, long, max_len=60)
    assert runs(tokenizer, example)[0][0] == "<User>hello<Assistant><think>\n"
    assert any(note.startswith("later responses dropped") for note in example.notes)
    with pytest.raises(RowError, match="leaves no room"):
        encode(tokenizer, R1, long[2:], max_len=60)


@pytest.mark.notices(
    "tools that are JSON text are one tool",
    "data/messages.py",
    "            value = json.loads(value)",
    "            value = [value]",
)
def test_tools_may_be_json_text_and_absent(tokenizer):
    given = encode(tokenizer, QWEN3, WITH_TOOLS, tools=json.dumps(TOOLS))
    assert given == encode(tokenizer, QWEN3, WITH_TOOLS, tools=TOOLS)
    assert encode(tokenizer, QWEN3, PLAIN, tools=[]) == encode(tokenizer, QWEN3, PLAIN)
    for tools, reason in (
        ("add", "is not JSON"),
        ({"name": "add"}, "is not a list of tools"),
        ('["add"]', "not a list of"),
    ):
        with pytest.raises(RowError, match=f"column 'tools' {reason}" if "list of" not in reason else reason):
            encode(tokenizer, QWEN3, PLAIN, tools=tools)


@pytest.mark.notices(
    "arguments of tool calls that are JSON text stay text",
    "data/messages.py",
    "    if not isinstance(arguments, str):",
    "    if True:",
)
def test_arguments_of_tools_may_be_json_text(tokenizer):
    text = [*WITH_TOOLS]
    text[2] = assistant(None, tool_calls=[call("add", '{"a": 1, "b": 1}')])
    for template in (QWEN3, LLAMA3):
        assert encode(tokenizer, template, text) == encode(tokenizer, template, WITH_TOOLS)
    text[2] = assistant(None, tool_calls=[call("add", "{")])
    with pytest.raises(RowError, match="a tool call whose arguments are not JSON"):
        encode(tokenizer, QWEN3, text)


@pytest.mark.notices(
    "keys without a value reach the chat template",
    "data/messages.py",
    "message = {name: item for name, item in value.items() if item is not None}",
    "message = dict(value)",
)
def test_keys_without_a_value_are_not_passed_to_the_template(tokenizer):
    """Rows of a parquet file have every name in every message."""
    names = ("content", "tool_calls", "reasoning_content", "name")
    full = [dict.fromkeys(names) | message for message in WITH_TOOLS]
    assert encode(tokenizer, LLAMA3, full, tools=TOOLS) == encode(tokenizer, LLAMA3, WITH_TOOLS, tools=TOOLS)


def test_a_template_that_does_not_know_tool_calls_is_refused(tokenizer):
    template = (
        "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
        "{% if add_generation_prompt %}assistant: {% endif %}"
    )
    with pytest.raises(RowError, match="does not render tool_calls"):
        encode(tokenizer, template, WITH_TOOLS)


def test_pairs_labelled_answers_and_steps_use_the_same_prompts(tokenizer):
    tokenizer.chat_template = R1
    prompt = "<User>1+1?<Assistant><think>\n"
    values = {
        "prompt": "1+1?",
        "chosen": SUM,
        "rejected": "3",
        "label": 1,
        "steps": ["so 2"],
        "labels": [1],
    }
    row = Row(values, "f", 1)
    pair = PairEncoder(tokenizer, DataConfig.of("dpo", apply_chat_template=True, prompt_key="prompt")).encode(row)
    assert [runs(tokenizer, each) for each in pair.examples] == [
        [(prompt, f"add\n</think>\n\n2{END}")], [(prompt, f"\n</think>\n\n3{END}")],
    ]  # fmt: skip
    labelled = DataConfig.of("kto", apply_chat_template=True, input_key="prompt", output_key="chosen")
    example = LabelledEncoder(tokenizer, labelled).encode(row)
    assert example.ids == pair.examples[0].ids and example.mask == pair.examples[0].mask
    steps = DataConfig.of("prm", apply_chat_template=True, input_key="prompt", steps_key="steps", label_key="labels")
    algo = AlgoConfig.of("prm", placeholder_token=";", reward_tokens=["+", "-"])
    assert tokenizer.decode(StepEncoder(tokenizer, steps, algo).encode(row).ids) == f"{prompt}so 2;"


@pytest.mark.parametrize("case", CASES)
def test_rollouts_have_the_same_prompts(tokenizer, case):
    template, messages, tools, _, _ = CASES[case]
    tokenizer.chat_template = template
    config = DataConfig.of("ppo", apply_chat_template=True, tools_key="tools")
    prompt = PromptEncoder(tokenizer, config).encode(Row({"input": messages[:-1], "tools": tools}, "f", 1))
    assert prompt.text == asked(tokenizer, messages, tools)[-1]


SHARED = [
    {"from": "system", "value": "be kind"},
    {"from": "human", "value": "hello there"},
    {"from": "gpt", "value": "hello user"},
]


@pytest.mark.notices(
    "an answer of a ShareGPT conversation is one of the user",
    "data/messages.py",
    '"gpt": "assistant",',
    '"gpt": "user",',
)
def test_sharegpt_conversations_are_messages(tokenizer):
    same = [SYSTEM, user("hello there"), assistant("hello user")]
    assert encode(tokenizer, LLAMA3, SHARED) == encode(tokenizer, LLAMA3, same)
    with pytest.raises(RowError, match="an item from 'alien'; known values are human, user, gpt"):
        encode(tokenizer, LLAMA3, [*SHARED[:2], {"from": "alien", "value": "x"}])
