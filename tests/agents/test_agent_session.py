"""Sessions: the ledger is append-only, and each request is the ledger; room, seeds, cutting and forks."""

from __future__ import annotations

import json
import random
from types import SimpleNamespace

import numpy as np
import pytest
from scripted import STOP, Scripted, chat_task, open_session, run

from given import prompt
from rlhf_suite.agents.base import Task
from rlhf_suite.agents.episodes import with_outcome
from rlhf_suite.config.declarations.rollout import RolloutConfig
from rlhf_suite.data.ending import Ending
from rlhf_suite.data.text_encoders import Prompt
from rlhf_suite.data.trajectory import ENVIRONMENT, MODEL, PROMPT, to_batch
from rlhf_suite.launch.loop_thread import LoopThread
from rlhf_suite.rewards.base import Scored
from rlhf_suite.rl.sampling import TRAINING, Sampler, new_ledgers

TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}
WORDS = ["2 + 3", " =", "\n", "<", "tool_call", "answers ", "  ", '"value"', "é", "}", "too low?", "\n\n", "🙂"]


def text(draw: random.Random) -> str:
    return "".join(draw.choice(WORDS) for _ in range(draw.randint(1, 8)))


def reply(draw: random.Random) -> str:
    call = json.dumps({"name": "add", "arguments": {"a": text(draw)}}, indent=draw.choice([None, 1]))
    return text(draw) + (f"<tool_call>{call}</tool_call>" if draw.random() < 0.5 else "")


@pytest.mark.notices(
    "what the model wrote is decoded and encoded again",
    "agents/session.py",
    "prompt_ids=ledger.ids.tolist(),",
    "prompt_ids=tokens(self.bridge.tokenizer, self.bridge.tokenizer.decode(ledger.ids)),",
)
@pytest.mark.notices(
    "what an environment says is trained on",
    "data/trajectory.py",
    "self._append(np.asarray(ids), ENVIRONMENT, zeros(ids), -1)",
    "self._append(np.asarray(ids), MODEL, zeros(ids), -1)",
)
@pytest.mark.notices(
    "every turn of an episode draws the same random numbers",
    "agents/session.py",
    "if self.num_turns else ()",
    "if False else ()",
)
@pytest.mark.parametrize("seed", range(8))
def test_the_prompt_of_every_request_is_the_ledger_at_that_moment(tokenizer, seed, record_property):
    draw = random.Random(seed)
    turns = 125
    record_property("turns of each conversation", int(turns))
    policy = Scripted(tokenizer, (reply(draw) for _ in range(turns)), seed)
    session = open_session(tokenizer, policy, chat_task(tokenizer, tools=[TOOL]), parser="hermes", max_len=10**6)

    async def converse() -> None:
        for number in range(turns):
            before = session.ledgers[0].ids.copy()
            turn = await session.reply()
            assert list(policy.asked[-1].prompt_ids) == before.tolist()
            ledger = session.ledgers[0].ids
            assert ledger[: len(before)].tolist() == before.tolist()
            assert ledger[len(before) :].tolist() == turn.ids.tolist(), "the tokens that were sampled"
            if number < turns - 1:
                answers = [{"role": "tool", "tool_call_id": call.id, "content": text(draw)} for call in turn.calls]
                assert session.observe(answers or [{"role": "user", "content": text(draw)}])

    run(converse)
    ledger = session.ledgers[0]
    assert [len(session.ledgers), len(ledger.turns)] == [1, turns]
    assert ((ledger.engine_log_probs < 0) == (ledger.owner == MODEL)).all()
    assert ((ledger.version == 7) == (ledger.owner == MODEL)).all()
    encoded = tokenizer(tokenizer.decode(ledger.ids), add_special_tokens=False)["input_ids"]
    assert encoded != ledger.ids.tolist(), "or this test would not notice text that is encoded again"
    assert len({request.seed for request in policy.asked}) == turns
    assert len({request.affinity for request in policy.asked}) == 1


def asked_for(request) -> tuple:
    return list(request.prompt_ids), request.max_new_tokens, request.seed, request.sampling


@pytest.mark.parametrize(("max_len", "max_new_tokens"), [(64, None), (64, 5), (20, 50)])
def test_the_first_turn_is_what_the_sampler_samples(tokenizer, max_len, max_new_tokens):
    prompts = [prompt(n, [5, 6, 7 + n], "p") for n in range(3)]
    stops, script = (tokenizer.eos_token_id, 1), [("12 34", "stop"), ("too high or too low", "length")] * 3
    config = RolloutConfig.of("ppo", temperature=0.7, stop=["x"], max_new_tokens=max_new_tokens)
    engines = Scripted(tokenizer, script)
    engines.start = LoopThread("engines").start
    sampler = Sampler(config, engines, stops, seed=42, max_len=max_len, adds_greedy=False, sleeps=False)
    settings, order = sampler.settings(0.7), (2, 0, 1)
    begun = [sampler.begin(group, prompts[n], 2, settings, (TRAINING, 9)) for group, n in enumerate(order)]
    expected = [ledger for responses in begun for ledger in responses.result(60)]

    policy, found = Scripted(tokenizer, script), []
    for start in (t for group, n in enumerate([2, 0, 1]) for t in new_ledgers(prompts[n], group, 2)):
        limits = {"max_len": max_len} | ({"max_new_tokens": max_new_tokens} if max_new_tokens else {})
        session = open_session(tokenizer, policy, Task.of(start.prompt), stops, **limits)
        session.open.ledger, session.sampling = start, sampler.settings(0.7)
        session.seed = (42, TRAINING, 9, start.prompt.index, start.sample)
        run(session.reply)
        found += session.episode().ledgers
    assert [asked_for(request) for request in policy.asked] == [asked_for(request) for request in engines.asked]
    for a, b in zip(expected, found, strict=True):
        for name, value in vars(a).items():
            assert name == "turn_records" or np.array_equal(value, getattr(b, name)), name


def ended(session, owner: int = MODEL) -> str:
    ledger = session.ledgers[-1]
    return session.bridge.tokenizer.decode(ledger.ids[ledger.owner == owner])


@pytest.mark.notices(
    "an answer that fills the ledger is appended",
    "agents/session.py",
    "len(ids) >= self.room()",
    "len(ids) > self.room()",
)
def test_messages_without_room_for_another_token_are_not_appended(tokenizer):
    task = chat_task(tokenizer)
    answer = [{"role": "user", "content": "wrong"}]
    lengths = {}
    for room in range(1, 40):
        session = open_session(tokenizer, Scripted(tokenizer, ["1"]), task, max_len=len(task.ids) + room + 1)
        if room == 1:
            run(session.reply)
            assert session.is_full, "of two tokens both are taken"
            continue
        run(session.reply)
        lengths[room] = (session.observe(answer), session.room())
        assert session.is_full is not lengths[room][0]
    fits = [room for room, (fit, _) in lengths.items() if fit]
    assert fits and fits[0] > 2 and lengths[fits[0]][1] == 1
    assert fits == list(range(fits[0], 40))


def test_all_that_follows_the_prompt_counts_as_the_response(tokenizer):
    task = chat_task(tokenizer)
    policy = Scripted(tokenizer, ["1", "2"])
    session = open_session(tokenizer, policy, task, max_new_tokens=30)
    run(session.reply)
    session.observe([{"role": "user", "content": "wrong"}])
    run(session.reply)
    first, second = policy.asked
    assert first.max_new_tokens == 30
    assert second.max_new_tokens == 30 - (len(second.prompt_ids) - len(task.ids)) > 0


def test_a_turn_that_was_cut_off_is_the_last(tokenizer):
    session = open_session(tokenizer, Scripted(tokenizer, [("12", "length")]), chat_task(tokenizer))
    turn = run(session.reply)
    before = session.ledgers[0].ids.tolist()
    assert turn.is_cut and not session.observe([{"role": "user", "content": "wrong"}])
    assert session.is_full and session.ledgers[0].ids.tolist() == before
    assert session.episode(ending=Ending.FULL).ledgers[0].truncated


def test_feedback_is_cut_to_its_limit(tokenizer):
    def size(text: str) -> int:
        return len(tokenizer(text, add_special_tokens=False)["input_ids"])

    session = open_session(tokenizer, Scripted(tokenizer, ["a"] * 3), chat_task(tokenizer), max_feedback_tokens=12)
    long = "é🙂 wrong, try again " * 20
    assert size(session.cutter.cut(long)) <= 12 and session.cutter.cut(long).endswith("[...]")
    assert session.cutter.cut("short") == "short"
    run(session.reply)
    assert session.observe([{"role": "user", "content": long}])
    assert "<|im_start|>assistant\n" in ended(session, ENVIRONMENT), "what the template adds is whole"
    shares = session.cutter.cut_all([{"role": "tool", "content": long}] * 3)
    assert sum(size(message["content"]) for message in shares) <= 12
    run(session.reply)
    count = len(session.ledgers[0].ids)
    assert session.observe_text(long, "\n```output\n", "\n```\n")
    added = tokenizer.decode(session.ledgers[0].ids[count:])
    assert added.startswith("\n```output\n") and added.endswith("[...]\n```\n")


def test_an_environment_may_give_the_prompt(tokenizer):
    task = chat_task(tokenizer)
    session = open_session(tokenizer, Scripted(tokenizer, ["1"]), task)
    assert session.set_prompt(None, None) and session.ledgers[0].ids.tolist() == list(task.ids)
    assert session.set_prompt([*task.messages, {"role": "user", "content": "two"}], None)
    ledger = session.ledgers[0]
    assert (ledger.owner == PROMPT).all() and (ledger.prompt.index, ledger.group, ledger.sample) == (3, 1, 2)
    assert tokenizer.decode(ledger.ids) == (
        f"<|im_start|>user\nbegin{STOP}\n<|im_start|>user\ntwo{STOP}\n<|im_start|>assistant\n"
    )
    run(session.reply)
    assert session.ledgers[0].prompt.index == 3
    plain = open_session(tokenizer, Scripted(tokenizer, []), Task([5], "x"), max_len=4)
    assert not plain.set_prompt(None, "a text that is too long") and plain.is_full


def user(text: str) -> dict:
    return {"role": "user", "content": text}


def test_a_known_conversation_goes_on_in_its_ledger(tokenizer):
    policy = Scripted(tokenizer, ["<think>why</think>one", "two", "three"])
    session = open_session(tokenizer, policy, chat_task(tokenizer))
    messages = [user("begin")]
    for said in ("one", "two", "three"):
        assert session.continue_from(messages)
        turn = run(session.reply)
        assert turn.content == said
        messages += [{"role": "assistant", "content": f" {said}"}, user(f"after {said}")]
    assert len(session.ledgers) == 1 and "why" in ended(session)
    assert list(policy.asked[2].prompt_ids)[: len(policy.asked[1].prompt_ids)] == list(policy.asked[1].prompt_ids)


@pytest.mark.notices(
    "a fork keeps turns that its history does not have",
    "agents/session.py",
    "return self.fork([*continuation.kept, *",
    "return self.fork([*(branch.ledger.ids.tolist() if branch else []), *",
)
def test_a_rewritten_conversation_forks_and_each_sampled_token_is_the_models_once(tokenizer):
    policy = Scripted(tokenizer, ["one", "two", "other", "summary"])
    session = open_session(tokenizer, policy, chat_task(tokenizer))
    history = [user("begin"), {"role": "assistant", "content": "one"}, user("next")]
    for messages in (history[:1], history):
        assert session.continue_from(messages)
        run(session.reply)
    assert session.continue_from([*history[:2], user("something else")])  # from the first turn on
    run(session.reply)
    assert session.continue_from([user("a compacted history")])  # from the start
    run(session.reply)
    first, second, third = session.ledgers
    assert [each.fork for each in session.ledgers] == [0, 1, 2]
    assert {(each.prompt.index, each.group, each.sample) for each in session.ledgers} == {(3, 1, 2)}
    turns = [tokenizer.decode(turn[:-1]) for each in session.ledgers for turn in each.turns]
    assert turns == ["one", "two", "other", "summary"]
    shared = len(policy.asked[0].prompt_ids) + len(first.turns[0])
    assert second.ids[:shared].tolist() == first.ids[:shared].tolist(), "in the tokens that were sampled"
    begin, said = f"<|im_start|>user\nbegin{STOP}\n", "<|im_start|>assistant\n"
    asked = f"{begin}{said}one{STOP}\n<|im_start|>user\nsomething else{STOP}\n{said}"
    assert tokenizer.decode(second.ids) == f"{asked}other{STOP}"
    assert "begin" not in tokenizer.decode(third.ids)
    assert len({request.seed for request in policy.asked}) == 4


def said(text: str) -> dict:
    return {"role": "assistant", "content": text}


BEGIN = [user("begin"), said("one")]
HISTORIES = {
    "an edited history": [[user("begin")], [*BEGIN, user("next")], [*BEGIN, user("edited")]],
    "a compaction": [
        [user("begin")],
        [*BEGIN, user("next")],
        [user("sum up: one two")],
        [user("begin, and so far: three"), user("go on")],
    ],
    "parallel sub-agents": [
        [user("begin")],
        [user("you are the first")],
        [user("you are the second")],
        [user("you are the first"), said("two"), user("more")],
        [user("you are the second"), said("three"), user("more")],
        [*BEGIN, user("the first says four, the second five")],
    ],
}


@pytest.mark.notices(
    "the last ledger of an episode is not that of the last turn",
    "agents/session.py",
    "return Episode([*others, ledger]",
    "return Episode(self.ledgers",
)
@pytest.mark.parametrize("name", HISTORIES)
def test_each_sampled_token_reaches_training_once(tokenizer, name):
    words = ["one", "two", "three", "four", "five", "six"][: len(HISTORIES[name])]
    policy = Scripted(tokenizer, words)
    session = open_session(tokenizer, policy, chat_task(tokenizer))
    sampled: list[float] = []
    for messages, word in zip(HISTORIES[name], words, strict=True):
        assert session.continue_from(messages)
        turn = run(session.reply)
        assert turn.content == word
        ledger = session.open.ledger
        sampled += ledger.engine_log_probs[-len(turn.ids) :].tolist()
    assert not session.continue_from([user("too long " * 2000)]), "it leaves no ledger"
    ledgers = with_outcome(session.episode(Scored(1.0, 1.0)))
    batch = to_batch(ledgers)
    trained = batch.engine_log_probs[batch.mask.bool()].tolist()
    assert len(set(sampled)) == len(sampled) > len(words) and sorted(trained) == sorted(sampled)
    assert [t.fork for t in ledgers] == [*range(len(ledgers))] and len(ledgers) == (
        2 if name == "an edited history" else 3
    )
    assert [t.reward for t in ledgers] == [None] * (len(ledgers) - 1) + [1.0]
    assert tokenizer.decode(ledgers[-1].turns[-1][:-1]) == words[-1], "the last turn is in the last ledger"
    assert batch.episode.tolist() == [0] * len(ledgers)


def test_a_fork_without_room_ends_the_episode(tokenizer):
    task = chat_task(tokenizer)
    session = open_session(tokenizer, Scripted(tokenizer, ["one"]), task, max_len=len(task.ids) + 20)
    run(session.reply)
    assert not session.continue_from([user("a very long history " * 20)])
    assert len(session.ledgers) == 1 and session.is_full


def test_a_task_has_what_the_prompt_has():
    chat = json.dumps({"messages": [user("x")], "tools": [TOOL]})
    given = Prompt([1, 2], "text", "label", "math", "f:1", '{"level": 3}', chat)
    task = Task.of(given)
    assert SimpleNamespace(**vars(task)) == SimpleNamespace(
        ids=[1, 2],
        text="text",
        messages=(user("x"),),
        tools=(TOOL,),
        label="label",
        datasource="math",
        columns={"level": 3},
        images=(),
    )


@pytest.mark.notices(
    "a fork of a greedy episode is trained on",
    "agents/session.py",
    "ledger.greedy, ledger.role = first.greedy, first.role",
    "ledger.greedy, ledger.role = False, first.role",
)
def test_a_fork_of_a_greedy_episode_is_greedy_so_that_it_is_not_trained_on(tokenizer):
    session = open_session(tokenizer, Scripted(tokenizer, ["a", "b"]), chat_task(tokenizer))
    session.open.ledger.greedy = True

    async def play() -> None:
        assert session.set_prompt(None, None)
        await session.reply()
        assert session.continue_from([{"role": "user", "content": "another question"}])
        await session.reply()

    run(play)
    assert [ledger.greedy for ledger in session.ledgers] == [True, True]
