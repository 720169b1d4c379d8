"""Answers that leave no room are cut with a mark (agent.cut_to_fit), in each way in which an episode can go on."""

from __future__ import annotations

import pytest
from endpoint_episodes import TOOL, Model, ask, echo, trained, user
from scripted import Scripted, chat_task, open_session, run

from rlhf_suite.agents.cutting import MARK
from rlhf_suite.data.trajectory import ENVIRONMENT, MODEL

KEEP = 20
LONG = "wrong, try again: too high or too low? " * 30


def size(tokenizer, text: str) -> int:
    return len(tokenizer(text, add_special_tokens=False)["input_ids"])


def after_a_turn(tokenizer, **limits):
    session = open_session(tokenizer, Scripted(tokenizer, ["a", "b"]), chat_task(tokenizer), **limits)
    run(session.reply)
    return session


@pytest.mark.notices(
    "a cut leaves one token for the next turn, not the wanted number",
    "agents/cutting.py",
    "(excess := len(ids) + keep - room) > 0",
    "(excess := len(ids) + 1 - room) > 0",
)
@pytest.mark.parametrize("bound", [{"max_len": 160}, {"max_len": 4000, "max_new_tokens": 140}])
@pytest.mark.parametrize("way", ["message", "text", "template"])
def test_an_answer_that_does_not_fit_is_cut_with_a_mark(tokenizer, bound, way):
    """As far as needed and no further: the room for the next turn is the wanted one, or a few tokens more."""

    def go_on(session) -> bool:
        session.renders_history = way == "template"
        if way == "text":
            return session.observe_text(LONG, "\n```output\n", "\n```\n")
        return session.observe([{"role": "user", "content": LONG}])

    if way == "template" and "max_new_tokens" in bound:
        pytest.skip("each turn of this history has a prompt of its own")
    assert not go_on(after_a_turn(tokenizer, **bound)), "or there is nothing to cut"
    session = after_a_turn(tokenizer, **bound, cut_to_fit=KEEP)
    assert go_on(session) and KEEP <= session.room() <= KEEP + 4
    ledger = session.open.ledger
    said = tokenizer.decode(ledger.ids[ledger.owner == ENVIRONMENT])
    assert said.count(MARK) == 1 and LONG[:40] in said and (way != "text" or said.endswith(f"{MARK}\n```\n"))
    assert tokenizer.decode(ledger.ids[ledger.owner == MODEL]).startswith("a")


def test_the_longest_answers_are_cut_and_short_ones_stay(tokenizer):
    session = after_a_turn(tokenizer, max_len=200, cut_to_fit=KEEP)
    answers = [{"role": "tool", "content": text} for text in ("12", LONG, "34", LONG[5:])]
    assert session.observe(answers) and session.room() >= KEEP
    said = [message["content"] for message in session.open.messages[-4:]]
    assert (said[0], said[2]) == ("12", "34") and said[1].endswith(MARK) and said[3].endswith(MARK)


def test_an_answer_that_fits_is_not_touched_and_one_that_no_cut_can_save_ends_the_episode(tokenizer):
    session = after_a_turn(tokenizer, max_len=400, cut_to_fit=KEEP)
    assert session.observe([{"role": "user", "content": "4"}])
    assert MARK not in tokenizer.decode(session.open.ledger.ids)
    full = after_a_turn(tokenizer, max_len=200, cut_to_fit=199)
    before = full.open.ledger.ids.tolist()
    assert not full.observe([{"role": "user", "content": LONG}]) and full.open.ledger.ids.tolist() == before


@pytest.mark.notices(
    "the endpoint does not know the conversation of a message that it cut",
    "agents/session.py",
    "return Continuation(branch, branch.ledger.ids[:length].tolist(), ids, messages[:end], rest)",
    "return Continuation(branch, branch.ledger.ids[:length].tolist(), ids, messages[:end], shown)",
)
@pytest.mark.stack
def test_a_program_goes_on_with_an_answer_that_was_cut_in_one_ledger(play, tokenizer):
    """Its own history has the whole text, which is compared, and the ledger has the text that was cut."""
    policy = Model(tokenizer, echo)

    def program(task, base_url, api_key):
        messages = list(task.messages)
        for answer in (LONG * 40, "4", None):  # more characters than a ledger could have tokens of
            response = ask(base_url, api_key, messages, tools=[TOOL])
            assert response.status_code == 200, response.text
            messages += [response.json()["choices"][0]["message"], user(answer or "")]
        return 1.0

    _, ledgers = play(program, policy, max_len=300, cut_to_fit=100)
    assert len(ledgers) == 1 and trained(ledgers) == sorted(policy.written)
    text = tokenizer.decode(ledgers[0].ids)
    assert text.count(MARK) == 1 and text.count(LONG[:40]) >= 1 and len(ledgers[0].turns) == 3
