"""What a turn says: content, reasoning, calls; a call that cannot be read has a problem and is never executed."""

from __future__ import annotations

import json

import numpy as np
import pytest

from rlhf_suite.agents.base import ToolCall
from rlhf_suite.agents.model_json import HALF_PAIR, NOT_FINITE, TOO_DEEP
from rlhf_suite.agents.parsing import CUT_OFF, Parsed, TurnReader
from rlhf_suite.data.generation import Generation
from rlhf_suite.errors import UserError

CALL = '{"name": "add", "arguments": {"a": 1}}'
OPENED = "<|im_start|>assistant\n<think>\n"


def read(
    tokenizer, text: str, parser: str | None, prompt: str = "<|im_start|>assistant\n", finish: str = "stop", **more
):
    def ids(text: str) -> list[int]:
        return tokenizer(text, add_special_tokens=False)["input_ids"]

    sampled = np.array(ids(text) + [tokenizer.eos_token_id] * (finish == "stop"), np.int32)
    numbers = np.zeros(len(sampled), np.float32)
    generation = Generation(0, sampled, numbers, finish, numbers.astype(np.int32))
    return TurnReader(tokenizer, [tokenizer.eos_token_id], parser, **more).turn(generation, ids(prompt), [])


def calls(turn) -> list[tuple]:
    return [(call.id, call.name, call.arguments, call.problem) for call in turn.calls]


@pytest.mark.parametrize("parser", ["hermes", "json", None])
def test_reasoning_is_not_content(tokenizer, parser):
    assert read(tokenizer, "<think>\nhm\n</think>\n\nyes", parser).content == "yes"
    turn = read(tokenizer, "hm\n</think>\n\nyes", parser, OPENED)
    assert (turn.reasoning, turn.content, turn.text) == ("hm", "yes", "hm\n</think>\n\nyes")
    assert read(tokenizer, "hm", parser, OPENED).content == "", "the reasoning did not end"
    assert read(tokenizer, " a < b ", parser).content == "a < b"


def test_calls_between_tags(tokenizer):
    turn = read(tokenizer, f"Let me see.\n<tool_call>\n{CALL}\n</tool_call>\n<tool_call>{CALL}</tool_call>", "hermes")
    assert turn.content == "Let me see."
    assert calls(turn) == [("call00001", "add", {"a": 1}, None), ("call00002", "add", {"a": 1}, None)]
    message = turn.message()
    assert [call["function"] for call in message["tool_calls"]] == [json.loads(CALL)] * 2
    assert read(tokenizer, f"{CALL}", "hermes").calls == ()
    assert read(tokenizer, f"<tool_call>{CALL}</tool_call>", None).calls == ()
    assert read(tokenizer, f"<think><tool_call>{CALL}</tool_call></think>no", "hermes").calls == ()


@pytest.mark.notices(
    "a call that cannot be read is text",
    "agents/parsing.py",
    're.compile(r"<tool_call>(.*?)(?:</tool_call>|\\Z)", re.DOTALL)',
    're.compile(r"<tool_call>(.*?)</tool_call>", re.DOTALL)',
)
@pytest.mark.parametrize(
    ("body", "problem"),
    [
        ('{"name": "add", "arguments": {"a": 1}', "not a JSON object"),
        ("add(1)", "not a JSON object"),
        ('{"arguments": {}}', "no name"),
        ('["add"]', "no name"),
        ('{"name": "add", "arguments": "{"}', "not JSON"),
        ('{"name": "add", "arguments": [1]}', "not an object"),
    ],
)
def test_a_call_that_cannot_be_read_is_a_call_with_a_problem(tokenizer, body, problem):
    for text in (f"<tool_call>{body}</tool_call>", f"<tool_call>{body}"):
        turn = read(tokenizer, text, "hermes")
        assert turn.content == "" and problem in turn.calls[0].problem


@pytest.mark.notices(
    "JSON that is nested deeply in a call ends the run",
    "agents/model_json.py",
    "    except RecursionError:\n",
    "    except KeyError:\n",
)
@pytest.mark.notices(
    "half of a surrogate pair in a call reaches tokenizers and files",
    "agents/model_json.py",
    "isinstance(part, str) and not is_encodable(part)",
    "False",
)
@pytest.mark.parametrize("parser", ["hermes", "json"])
@pytest.mark.parametrize(
    ("value", "problem"),
    [
        ("[" * 5000, TOO_DEEP),
        ("[" * 5000 + "]" * 5000, TOO_DEEP),
        ('{"a": ' * 100 + "1" + "}" * 100, TOO_DEEP),
        ('["\\ud800"]', HALF_PAIR),
        ('{"\\udfff": 1}', HALF_PAIR),
        ("NaN", NOT_FINITE),
        ("[-Infinity]", NOT_FINITE),
        ("1e999", NOT_FINITE),
        ("9" * 5000, "digits"),
    ],
    ids=["open", "lists", "objects", "text", "name", "nan", "infinity", "float", "integer"],
)
def test_what_cannot_be_passed_on_as_json_is_a_problem_of_the_call(tokenizer, parser, value, problem):
    inner = '{"a": ' + value + "}"
    bodies = [
        '{"name": "add", "arguments": ' + inner + "}",
        '{"name": "add", "arguments": ' + json.dumps(inner) + "}",
        '{"name": ' + value + ', "arguments": {}}',
    ]
    for body in bodies:
        (call,) = read(tokenizer, body if parser == "json" else f"<tool_call>{body}</tool_call>", parser).calls
        assert call.problem is not None and problem in call.problem and call.arguments == {}
        json.dumps([call.name, call.problem], ensure_ascii=False).encode()


@pytest.mark.notices(
    "a call in a turn that was cut off is whole",
    "agents/parsing.py",
    "CUT_OFF if is_cut else call.problem",
    "call.problem",
)
def test_a_call_in_a_turn_that_was_cut_off_is_never_whole(tokenizer):
    turn = read(tokenizer, f"<tool_call>{CALL}</tool_call>", "hermes", finish="length")
    assert turn.is_cut and calls(turn) == [("call00001", "add", {"a": 1}, CUT_OFF)]


def test_calls_of_a_parser_of_ones_own_are_looked_at_too(tokenizer):
    reader = TurnReader(tokenizer, [tokenizer.eos_token_id])
    for arguments, problem in (({"a": float("nan")}, NOT_FINITE), ({"a": "\ud800"}, HALF_PAIR), ({"a": {1}}, None)):
        reader.parse = lambda written, tools, given=arguments: Parsed("", (ToolCall("", "add", given),))
        generation = Generation(0, np.array([5], np.int32), np.zeros(1, np.float32), "stop", np.zeros(1, np.int32))
        (call,) = reader.turn(generation, [1], []).calls
        assert (call.problem is None) == (problem is None) and str(problem or "") in str(call.problem)


def test_a_whole_text_as_a_call(tokenizer):
    asked = '{"name": "add", "parameters": {"a": 1}}'
    assert calls(read(tokenizer, asked, "json")) == [("call00001", "add", {"a": 1}, None)]
    assert len(calls(read(tokenizer, f"[{asked}, {asked}]", "json"))) == 2
    assert calls(read(tokenizer, '{"name": "add", "arguments": "{\\"a\\": 1}"}', "json"))[0][2] == {"a": 1}
    assert "not a JSON object" in read(tokenizer, '{"name": "add"', "json").calls[0].problem
    assert read(tokenizer, "so {this} is text", "json").content == "so {this} is text"


def test_the_template_of_a_tokenizer(tokenizer):
    with pytest.raises(UserError, match=r"agent\.tool_parser=response_template: .*has no response_template"):
        TurnReader(tokenizer, [1], "response_template")
    call = {"type": "function", "function": "{content}"}
    tokenizer.response_template = {
        "start_anchor": "<|im_start|>assistant\n",
        "fields": {
            "content": {"close": "<|im_end|>"},
            "tool_calls": {"open": "<tool_call>", "close": "</tool_call>", "repeats": True, "content": "json"}
            | {"transform": call},
        },
    }
    try:
        turn = read(tokenizer, f"Let me see.<tool_call>{CALL}</tool_call>", "response_template")
        assert turn.content == "Let me see." and calls(turn) == [("call00001", "add", {"a": 1}, None)]
        assert read(tokenizer, "<tool_call>{broken</tool_call>", "response_template").calls[0].problem
        tokenizer.response_template = {"fields": {}}
        with pytest.raises(UserError, match="non-empty"):
            TurnReader(tokenizer, [1], "response_template")
    finally:
        del tokenizer.response_template


@pytest.mark.stack
def test_parsers_of_vllm(tokenizer):
    """In one test, since vLLM takes long to import."""
    turn = read(tokenizer, f"<think>hm</think>So.<tool_call>{CALL}</tool_call>", "vllm", of_vllm="hermes")
    assert (turn.reasoning, turn.content) == ("hm", "So.")
    assert calls(turn) == [("call00001", "add", {"a": 1}, None)]
    assert read(tokenizer, "So.", "vllm", of_vllm="hermes").content == "So."
    written = "<tool_call><function=add><parameter=a>1</parameter></function></tool_call>"
    assert calls(read(tokenizer, written, "vllm", of_vllm="qwen3_coder"))[0][1] == "add"
    assert read(tokenizer, f"<tool_call>{CALL}</tool_call>", "vllm", finish="length", of_vllm="hermes").calls[0].problem
    with pytest.raises(UserError, match=r"agent\.vllm_tool_parser=none is not a parser of vLLM; write .*hermes"):
        TurnReader(tokenizer, [1], "vllm", "none")
    with pytest.raises(UserError, match=r"vllm_tool_parser=deepseek_v3 is not for this tokenizer \(RuntimeError"):
        TurnReader(tokenizer, [1], "vllm", "deepseek_v3")
    with pytest.raises(UserError, match=r"vllm_tool_parser=openai reads only streams"):
        TurnReader(tokenizer, [1], "vllm", "openai")
