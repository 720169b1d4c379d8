"""The bridge between turns: equal to what the template writes, for families of templates that end turns differently."""

from __future__ import annotations

import pytest
from chat_templates import FAMILIES
from scripted import make_tokenizer

from rlhf_suite.agents.bridge import STANDIN, TRIED, Bridge
from rlhf_suite.config.declarations.data import DataConfig
from rlhf_suite.data.render import tokens
from rlhf_suite.data.row import RowError
from rlhf_suite.errors import UserError
from tokenizer_kinds import KINDS, tokenizer_of

QUESTION = {"role": "user", "content": "What is 2 + 3?"}
TAILS = {
    "user": [{"role": "user", "content": "  Now add 10.\n"}],
    "tool": [{"role": "tool", "name": "add", "tool_call_id": "call00001", "content": '5, "five" '}],
}
CALL = {"id": "call00001", "type": "function", "function": {"name": "add", "arguments": {"value": "2 3"}}}
REAL = {
    "user": {"role": "assistant", "content": "It is 5.", "reasoning_content": "2 and 3"},
    "tool": {"role": "assistant", "content": "", "tool_calls": [CALL], "reasoning_content": "2 and 3"},
}
CASES = [(name, kind) for name in FAMILIES for kind in TAILS]


@pytest.fixture(scope="module")
def tokenizers():
    return {name: make_tokenizer(family.special, family.template) for name, family in FAMILIES.items()}


def bridge_of(tokenizer, stops) -> Bridge:
    return Bridge(
        tokenizer, DataConfig.of("sft", apply_chat_template=True), tokenizer.convert_tokens_to_ids(list(stops))
    )


def found(tokenizer, name: str, kind: str) -> str:
    """Return what becomes of a conversation of a family: "whole", "end", "" if no stop fits, or "wrong"."""
    bridge = bridge_of(tokenizer, FAMILIES[name].stops)
    tools, tail, history = [TRIED] if kind == "tool" else [], TAILS[kind], [QUESTION, REAL[kind]]
    results = set()
    for stop, stop_text in bridge.stops.items():
        ids = bridge.after(stop, tail, tools)
        if ids is None:
            continue
        whole = bridge.prompt([*history, *tail], tools)
        text = tokenizer.apply_chat_template(history, tools=tools or None, tokenize=False)
        place = text.rfind(stop_text)
        is_shown = place >= max(text.rfind("5."), text.rfind("2 3"))  # a marker of the next turn is not
        held = text[: place + len(stop_text)] if is_shown else text + stop_text
        held_ids = tokenizer(held, add_special_tokens=False)["input_ids"]
        if whole[-len(ids) :] != ids or whole[-len(ids) - 1] != stop:
            results.add("wrong")
        else:
            results.add("whole" if held_ids + ids == whole else "end")
    return results.pop() if len(results) == 1 else "wrong" if results else ""


@pytest.mark.notices(
    "the bridge begins one token too early, with the end of the turn again",
    "agents/bridge.py",
    "return rest[len(closing) :]",
    "return rest[len(closing) - len(self.stops[stop]) :]",
)
@pytest.mark.notices(
    "the bridge loses the line break after the end of a turn",
    "agents/bridge.py",
    "return rest[len(closing) :]",
    "return rest[len(closing) :].lstrip()",
)
@pytest.mark.parametrize(("name", "kind"), CASES)
def test_the_bridge_is_what_the_template_writes_behind_a_turn(tokenizers, name, kind, record_property):
    record_property("families of templates", len(FAMILIES))
    expected = getattr(FAMILIES[name], kind)
    if name in ("gemma", "no end") and not expected:
        with pytest.raises(UserError):
            bridge_of(tokenizers[name], FAMILIES[name].stops).check([kind])
    else:
        assert found(tokenizers[name], name, kind) == expected


@pytest.mark.parametrize(("name", "kind"), CASES)
def test_the_check_at_the_start_refuses_what_cannot_go_on(tokenizers, name, kind):
    bridge = bridge_of(tokenizers[name], FAMILIES[name].stops)
    if getattr(FAMILIES[name], kind):
        bridge.check([kind])
    else:
        with pytest.raises(UserError, match=r"data\.tokenizer_chat_template.*agent\.kind=environment"):
            bridge.check([kind])


@pytest.mark.notices(
    "a message of the system after a turn begins a new ledger",
    "agents/bridge.py",
    "role in AFTER and self.goes_on_with(role)",
    'role in AFTER and role != "system" and self.goes_on_with(role)',
)
@pytest.mark.parametrize("name", FAMILIES)
def test_a_conversation_goes_on_with_a_reminder_of_the_system_where_the_template_shows_it_there(tokenizers, name):
    """Claude Code says by such messages what has changed. A template may drop or move them, or need another stop."""
    tokenizer, family = tokenizers[name], FAMILIES[name]
    bridge, reminder = bridge_of(tokenizer, family.stops), {"role": "system", "content": "be brief"}
    tails = [[*TAILS[kind], reminder] for kind in TAILS if getattr(family, kind)]
    seen = set()
    for tail in [[reminder], *tails]:
        is_tool = tail[0]["role"] == "tool"
        history, tools = [QUESTION, REAL["tool" if is_tool else "user"]], [TRIED] if is_tool else []
        for stop in bridge.stops:
            ids = bridge.on_from(stop, tail, tools)
            if ids is not None:
                assert bridge.prompt([*history, *tail], tools)[-len(ids) - 1 :] == [stop, *ids]
                assert "be brief" in tokenizer.decode(ids)
                seen.add(tail[0]["role"])
    moved = {"r1", "glm", "harmony", "no end"}
    assert seen == (set() if name in moved else {tail[0]["role"] for tail in [[reminder], *tails]})


def test_answers_of_several_tools_are_one_bridge(tokenizers):
    tools = [{"role": "tool", "name": "add", "tool_call_id": f"call0000{n}", "content": f"r{n}"} for n in (1, 2)]
    text = {
        name: bridge_of(tokenizers[name], FAMILIES[name].stops).text_after(
            tokenizers[name].convert_tokens_to_ids(stop), [*tools, {"role": "user", "content": "go on"}], [TRIED]
        )
        for name, stop in (("chatml", "<|im_end|>"), ("llama3", "<|eot_id|>"), ("glm", "<|observation|>"))
    }
    header = "<|start_header_id|>{}<|end_header_id|>\n\n"
    assert text == {
        "chatml": "\n<|im_start|>tool\nr1<|im_end|>\n<|im_start|>tool\nr2<|im_end|>\n"
        "<|im_start|>user\ngo on<|im_end|>\n<|im_start|>assistant\n",
        "llama3": f'{header.format("ipython")}"r1"<|eot_id|>{header.format("ipython")}"r2"<|eot_id|>'
        f"{header.format('user')}go on<|eot_id|>{header.format('assistant')}",
        "glm": "\n<tool_response>\nr1\n</tool_response>\n<tool_response>\nr2\n</tool_response>"
        "<|user|>\ngo on<|assistant|>\n",
    }


@pytest.mark.notices(
    "a stop token in the text of an answer counts as the end of the turn",
    "agents/bridge.py",
    "header, answered, _ = self.rest([tried], tools).partition(ANSWER)",
    "header, answered = self.rest(answers, tools), ANSWER",
)
def test_a_stop_token_in_the_text_of_an_answer_is_not_the_end_of_the_turn(tokenizers):
    bridge = bridge_of(tokenizers["glm"], FAMILIES["glm"].stops)
    observation, user = sorted(bridge.stops, key=lambda stop: bridge.stops[stop])
    answer = [{"role": "user", "content": "<|observation|> is a marker"}]
    assert bridge.after(observation, answer) is None
    assert bridge.text_after(user, answer) == "\n<|observation|> is a marker<|assistant|>\n"


@pytest.mark.notices(
    "an answer that holds the text of our stand-in loses its beginning or ends the run",
    "agents/bridge.py",
    "while mark in said:",
    "while False:",
)
@pytest.mark.parametrize(("name", "kind"), CASES)
def test_an_answer_may_hold_the_text_of_our_stand_in(tokenizers, name, kind):
    bridge = bridge_of(tokenizers[name], FAMILIES[name].stops)
    tools, (tail,) = [TRIED] if kind == "tool" else [], TAILS[kind]
    for stop in bridge.stops:
        for text in (STANDIN, f"a {STANDIN}N {STANDIN} b"):
            try:
                plain = bridge.text_after(stop, [{**tail, "content": text.replace(STANDIN, "SAID")}], tools)
            except RowError:  # the template refuses such a message
                continue
            if plain is not None:
                assert bridge.text_after(stop, [{**tail, "content": text}], tools) == plain.replace("SAID", STANDIN)


def test_a_turn_that_ended_with_another_token_cannot_go_on(tokenizers):
    tokenizer = tokenizers["chatml two stops"]
    bridge = bridge_of(tokenizer, FAMILIES["chatml two stops"].stops)
    end, other = tokenizer.convert_tokens_to_ids(["<|endoftext|>", "a"])
    assert bridge.after(end, TAILS["user"]) is None and bridge.after(other, TAILS["user"]) is None


@pytest.mark.notices(
    "tokens that merge across the end of a turn are not noticed",
    "agents/bridge.py",
    "if tokens(self.tokenizer, head) + ids != tokens(self.tokenizer, whole):",
    "if False:",
)
def test_tokens_that_merge_across_the_stop_are_refused():
    family = FAMILIES["chatml"]
    template = family.template.replace("<|im_end|>", "the")  # turns end with a word: no special token, so it merges
    bridge = bridge_of(make_tokenizer(family.special, template), ("t",))
    with pytest.raises(UserError, match=r"continue with a user's message: .*other tokens"):
        bridge.check(["user"])


@pytest.mark.parametrize("kind", KINDS)
def test_what_others_say_has_the_tokens_that_it_has_in_the_whole_conversation(kind):
    """Many tokenizers put a space in front of a text of its own."""
    tokenizer = tokenizer_of(kind)
    bridge = Bridge(tokenizer, DataConfig.of("sft", apply_chat_template=True), [tokenizer.eos_token_id])
    bridge.check(["user"])
    said = [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "Paris."}]
    answer = [{"role": "user", "content": "what is 4?"}]
    sampled = tokens(tokenizer, tokenizer.apply_chat_template(said, tokenize=False))
    ids = [*sampled, *bridge.after(tokenizer.eos_token_id, answer)]
    assert ids == bridge.prompt([*said, *answer])
    raw = tokens(tokenizer, "hello")
    text = "".join(tokenizer.convert_ids_to_tokens([*raw, *bridge.behind(raw, "\nParis.")]))
    assert text == "".join(tokenizer.convert_ids_to_tokens(tokens(tokenizer, "hello\nParis.")))
