"""Ledgers of programs that rewrite their history, send requests again, or ask for several samples."""

from __future__ import annotations

import asyncio
import json
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest
from endpoint_episodes import (
    Model,
    ask,
    client,
    echo,
    post,
    trained,
    user,
)

pytestmark = pytest.mark.stack


def edited(task, base_url, api_key):
    """Go on from the first turn twice, and then with a summary in place of the history."""
    first = ask(base_url, api_key, task.messages).json()["choices"][0]["message"]
    ask(base_url, api_key, [*task.messages, first, user("one")])
    ask(base_url, api_key, [*task.messages, first, user("two")])
    ask(base_url, api_key, [user("what happened so far: nothing")])
    return 1.0


def test_a_rewritten_history_is_a_new_ledger_and_each_token_is_trained_on_once(play, tokenizer):
    model = Model(tokenizer, echo)
    _, ledgers = play(edited, model)
    assert [len(ledger.turns) for ledger in ledgers] == [2, 1, 1]
    assert trained(ledgers) == sorted(model.written)
    shared = len(model.asked[0]) + len(ledgers[0].turns[0])
    assert list(model.asked[2])[:shared] == ledgers[0].ids[:shared].tolist(), "the first turn as it was sampled"


CALLED = '<tool_call>{"name": "add", "arguments": {"b": 1.0, "a": [2, 1e2]}}</tool_call>'


@pytest.mark.notices(
    "a call that a client of JavaScript repeats begins a new ledger",
    "agents/session.py",
    'canonical(call["arguments"])',
    'repr(call["arguments"])',
)
@pytest.mark.parametrize("sent", ['{"a":[2,100],"b":1}', '{"b": 1.0, "a": [2, 100.0]}', '{"a":[2,100],"b":2}'])
def test_a_call_that_a_client_writes_otherwise_is_the_same_call(play, tokenizer, sent):
    def run_agent(task, base_url, api_key):
        said = ask(base_url, api_key, task.messages).json()["choices"][0]["message"]
        said["tool_calls"][0]["function"]["arguments"] = sent
        answer = {"role": "tool", "tool_call_id": said["tool_calls"][0]["id"], "content": "3"}
        ask(base_url, api_key, [*task.messages, said, answer])
        return 1.0

    _, ledgers = play(run_agent, Model(tokenizer, lambda prompt: "done" if "<tool_call>" in prompt else CALLED))
    assert [len(ledger.turns) for ledger in ledgers] == ([1, 1] if sent.endswith("2}") else [2])


def test_sub_agents_at_the_same_time_are_trained_on_once(play, tokenizer):
    def sub_agent(base_url, api_key, name):
        messages = [user(f"you are {name}")]
        for _ in range(3):
            messages.append(ask(base_url, api_key, messages).json()["choices"][0]["message"])
            messages.append(user("more"))

    def run_agent(task, base_url, api_key):
        first = ask(base_url, api_key, task.messages).json()["choices"][0]["message"]
        with ThreadPoolExecutor(4) as pool:
            list(pool.map(lambda name: sub_agent(base_url, api_key, name), ["a", "b", "c", "d"]))
        ask(base_url, api_key, [*task.messages, first, user("all are done")])
        return 1.0

    model = Model(tokenizer, echo)
    _, ledgers = play(run_agent, model)
    assert trained(ledgers) == sorted(model.written)
    assert sorted(len(ledger.turns) for ledger in ledgers) == [2, 3, 3, 3, 3]
    assert "all are done" in tokenizer.decode(ledgers[-1].ids), "the last turn is in the last ledger"
    assert len({tuple(ledger.ids.tolist()) for ledger in ledgers}) == 5


@pytest.mark.notices(
    "a request that is sent again is a sample of its own",
    "agents/endpoint.py",
    "if is_retry and (before := self.asked.get(key)):",
    "if False and (before := self.asked.get(key)):",
)
def test_a_request_that_is_sent_again_gets_the_same_answer(play, tokenizer):
    seen = []

    def run_agent(task, base_url, api_key):
        for count in ("0", "1", "2"):
            seen.append(ask(base_url, api_key, task.messages, {"x-stainless-retry-count": count}).json())
        return 1.0

    model = Model(tokenizer, echo)
    _, (ledger,) = play(run_agent, model)
    assert len(model.asked) == 1 and len({str(each["choices"]) for each in seen}) == 1
    assert ledger.extra["agent/retries"] == 2 and ledger.extra["agent/orphans"] == 0


def test_the_client_of_openai_gets_its_answer_after_a_cut_connection(play, tokenizer):
    """The connection is cut after the whole answer has come: the client sends the request again by itself."""
    cuts = []

    class Cut(httpx.HTTPTransport):
        def handle_request(self, request):
            response = super().handle_request(request)
            if not cuts:
                cuts.append(response.read())
                raise httpx.ReadError("the connection was cut", request=request)
            return response

    answers = []

    def run_agent(task, base_url, api_key):
        model = client(base_url, api_key, http_client=httpx.Client(transport=Cut()))
        answers.append(model.chat.completions.create(model="m", messages=task.messages))
        return 1.0

    model = Model(tokenizer, echo)
    _, (ledger,) = play(run_agent, model)
    assert len(cuts) == len(model.asked) == len(ledger.turns) == 1 and ledger.extra["agent/retries"] == 1
    assert answers[0].choices[0].token_ids == json.loads(cuts[0])["choices"][0]["token_ids"]


def test_a_retry_joins_the_request_that_is_under_way(play, tokenizer):
    model = Model(tokenizer, echo)
    seen = []

    def run_agent(task, base_url, api_key):
        with pytest.raises(httpx.TimeoutException):
            post(
                f"{base_url}/chat/completions",
                json={"messages": list(task.messages)},
                headers={"authorization": f"Bearer {api_key}"},
                timeout=httpx.Timeout(10, read=0.2),
            )
        with ThreadPoolExecutor(1) as pool:
            again = pool.submit(ask, base_url, api_key, task.messages, {"x-stainless-retry-count": "1"})
            while not model.asked:
                pass
            model.loop.call_soon_threadsafe(model.gate.set)
            seen.append(again.result().json()["choices"][0]["message"]["content"])
        return 1.0

    async def generate(request):
        model.loop = model.loop or asyncio.get_running_loop()
        model.gate = model.gate or asyncio.Event()
        return await Model.generate(model, request)

    model.loop, model.generate = None, generate
    _, (ledger,) = play(run_agent, model)
    assert seen == ["answer 1"] and len(model.asked) == 1 and len(ledger.turns) == 1


@pytest.mark.notices(
    "turns that the program did not use are trained on",
    "agents/endpoint.py",
    "            self.session.forget(orphan.branch, orphan.end)\n",
    "",
)
def test_equal_requests_are_samples_and_those_that_are_not_used_are_not_trained_on(play, tokenizer):
    def run_agent(task, base_url, api_key):
        tries = [ask(base_url, api_key, task.messages).json()["choices"][0]["message"] for _ in range(3)]
        ask(base_url, api_key, [*task.messages, tries[1], user("the second is good")])
        return 1.0

    model = Model(tokenizer, lambda prompt: f"try {len(model.asked)}")
    _, ledgers = play(run_agent, model)
    assert len(model.asked) == 4 and ledgers[-1].extra["agent/orphans"] == 2
    turns = [tokenizer.decode(turn[:-1]) for ledger in ledgers for turn in ledger.turns]
    assert turns == ["try 2", "try 4"] and len(trained(ledgers)) == sum(len(t) for x in ledgers for t in x.turns)


def test_of_equal_requests_behind_a_turn_the_unused_one_leaves_the_rest_of_its_ledger(play, tokenizer):
    def run_agent(task, base_url, api_key):
        first = ask(base_url, api_key, task.messages).json()["choices"][0]["message"]
        then = [*task.messages, first, user("again")]
        ask(base_url, api_key, then)
        ask(base_url, api_key, then)
        return 1.0

    model = Model(tokenizer, lambda prompt: f"try {len(model.asked)}")
    _, ledgers = play(run_agent, model)
    turns = [[tokenizer.decode(turn[:-1]) for turn in ledger.turns] for ledger in ledgers]
    assert turns == [["try 1"], ["try 3"]] and ledgers[-1].extra["agent/orphans"] == 1
    assert ledgers[0].ids.tolist() == ledgers[1].ids[: len(ledgers[0].ids)].tolist()


def test_of_equal_requests_that_nothing_continues_the_last_one_is_trained_on(play, tokenizer):
    def run_agent(task, base_url, api_key):
        for _ in range(2):
            ask(base_url, api_key, [user("sum up")])
        ask(base_url, api_key, task.messages)
        return 1.0

    model = Model(tokenizer, lambda prompt: f"try {len(model.asked)}")
    _, ledgers = play(run_agent, model)
    assert [tokenizer.decode(ledger.turns[0][:-1]) for ledger in ledgers] == ["try 2", "try 3"]
    assert ledgers[-1].extra["agent/orphans"] == 1
