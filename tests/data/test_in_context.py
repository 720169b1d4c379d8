"""Texts are tokenised where they stand: an answer has the ids that it has after its prompt, for any tokenizer."""

from __future__ import annotations

from itertools import product

import pytest

from rlhf_suite.config.declarations.algo import AlgoConfig
from rlhf_suite.config.declarations.data import DataConfig
from rlhf_suite.data.preferences import LabelledEncoder, PairEncoder
from rlhf_suite.data.render import begin_ids, encode_after, pieces, tokens
from rlhf_suite.data.row import Row
from rlhf_suite.data.steps import SolutionEncoder, StepEncoder, StepFormat
from rlhf_suite.data.text_encoders import ConversationEncoder
from rlhf_suite.offline.responses import ResponseEncoder
from tokenizer_kinds import KINDS, tokenizer_of

CHAT = [
    {"role": "user", "content": "hello there"},
    {"role": "assistant", "content": "hello user"},
    {"role": "user", "content": "what is the capital?"},
    {"role": "assistant", "content": "Paris."},
]
TEMPLATE = "User: {}\nAssistant:"


@pytest.fixture(params=product(KINDS, (True, False)), ids=lambda each: f"{each[0]}{'' if each[1] else ' without BOS'}")
def tokenizer(request):
    return tokenizer_of(*request.param)


def row(**values):
    return Row(values, "rows.jsonl", 1)


def whole(tokenizer, text):
    """What a model is given that reads the whole text, with its end."""
    return [*tokens(tokenizer, text, begin_ids(tokenizer)), tokenizer.eos_token_id]


def test_an_answer_has_the_tokens_of_the_whole_text(tokenizer):
    text, config = "User: hello\nAssistant: Paris.", {"input_template": TEMPLATE, "output_key": "output"}
    example = ConversationEncoder(tokenizer, DataConfig.of("sft", **config)).encode(
        row(input="hello", output=" Paris.")
    )
    count = len(whole(tokenizer, TEMPLATE.format("hello"))) - 1
    if whole(tokenizer, text)[:count] == whole(tokenizer, TEMPLATE.format("hello"))[:-1]:
        assert example.ids == whole(tokenizer, text)
    assert example.mask == [0] * count + [1] * (len(example.ids) - count)
    assert tokenizer.decode(example.ids[:-1], skip_special_tokens=True).strip() == text


@pytest.mark.parametrize("before", ["Assistant: ", "Assistant:", "hel", "the 1", "[INST]", "</s>", "a\n", "so  "])
@pytest.mark.parametrize("text", ["Paris.", " Paris.", "lo", "2 is 4", "\n\nhello", "  so", "</s>[INST] hello"])
def test_a_border_within_a_token_adds_nothing(tokenizer, before, text):
    ids = [*tokens(tokenizer, before), *encode_after(tokenizer, before, text)]
    assert ids[: len(tokens(tokenizer, before))] == tokens(tokenizer, before)
    assert decoded(tokenizer, ids) == decoded(tokenizer, tokens(tokenizer, before + text))


def decoded(tokenizer, ids):
    """The text of ids, with all its spaces."""
    return "".join(tokenizer.convert_ids_to_tokens(ids))


def test_every_turn_is_trained_on_behind_the_tokens_that_it_is_sampled_behind(tokenizer):
    config = DataConfig.of("sft", apply_chat_template=True, multiturn=True)
    example = ConversationEncoder(tokenizer, config).encode(row(input=CHAT))
    for place in (1, 3):
        prompt = tokens(tokenizer, tokenizer.apply_chat_template(CHAT[:place], tokenize=False))
        assert example.ids[: len(prompt)] == prompt and example.mask[len(prompt) - 1 : len(prompt) + 1] == [0, 1]
    assert example.ids == tokens(tokenizer, tokenizer.apply_chat_template(CHAT, tokenize=False))


def test_preferences_and_scores_read_what_a_server_reads(tokenizer):
    """A server gets the text of prompt and answer (task=serve_rm)."""
    texts = {"input": "hello", "prompt": "hello", "chosen": "</s>", "output": "</s>", "rejected": "[INST] 5</s>"}
    rows = row(**texts | {"label": 1, "response": "</s>"})
    expected = whole(tokenizer, "User: hello\nAssistant:")
    pair = PairEncoder(tokenizer, DataConfig.of("dpo", input_template=TEMPLATE, prompt_key="prompt")).encode(rows)
    assert [each.ids for each in pair.examples] == [
        expected,
        whole(tokenizer, "User: hello\nAssistant:[INST] 5</s>")[:-1],
    ]
    assert LabelledEncoder(tokenizer, DataConfig.of("kto", input_template=TEMPLATE)).encode(rows).ids == expected
    assert ResponseEncoder(tokenizer, DataConfig.of("score", input_template=TEMPLATE)).encode(rows).ids == expected


def test_a_response_that_is_cut_off_is_scored_behind_its_prompt(tokenizer):
    encoder = ResponseEncoder(tokenizer, DataConfig.of("score", input_template="[INST]{}[/INST]"))
    found = encoder.encode(row(prompt="hello", response=" Paris", finish_reason="length"))
    assert found.ids == whole(tokenizer, "[INST]hello[/INST] Paris")[:-1]


@pytest.mark.parametrize("step", ["is 4", "2"])
def test_steps_have_no_space_of_their_own(tokenizer, step):
    algo, data = (
        AlgoConfig.of("prm", placeholder_token="[INST]", reward_tokens=["[INST]", "[/INST]"]),
        {"label_key": "labels"},
    )
    encoder = StepEncoder(tokenizer, DataConfig.of("prm", **data, input_key="q", steps_key="steps"), algo)
    listed = encoder.encode(row(q="2 +", steps=[step, "so 5"], labels=["[INST]", "[/INST]"]))
    text = f"2 +\n{step}[INST]\nso 5[INST]"
    assert decoded(tokenizer, listed.ids) == decoded(tokenizer, whole(tokenizer, text)[:-1])
    assert len(listed.ids) - listed.ids[::-1].index(encoder.placeholder) == len(listed.ids)
    marked = StepEncoder(tokenizer, DataConfig.of("prm", **data, input_key="q"), algo)
    trained = marked.encode(row(q=f"2 + {step}[INST] so 5[INST]", labels=["[INST]", "[/INST]"]))
    form = StepFormat("[INST]", ["[INST]", "[/INST]"], " ", False, None, False, 99)
    assert SolutionEncoder(tokenizer, form, "\n").encode("2 + ", f"{step}\nso 5").ids == trained.ids


def test_pieces_without_text_have_no_tokens_and_short_ones_do_not_hide_what_stands_before_them(tokenizer):
    texts = ["[INST]", "", "hel", "", "lo", " user"]
    found = pieces(tokenizer, texts)
    assert [bool(each) for each in found] == [True, False, True, False, True, True]
    assert decoded(tokenizer, [each for piece in found for each in piece]) == decoded(
        tokenizer, tokens(tokenizer, "".join(texts))
    )
