"""The endpoint, over HTTP with the client of OpenAI: turns, tools, streams, retries, rewritten histories, limits."""

from __future__ import annotations

import asyncio
import json
import re
import socket
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from threading import Event

import httpx
import numpy as np
import pytest
from scripted import chat_task, open_session

from clock import HOURS_S
from rlhf_suite.agents.chat import Refused, read_request
from rlhf_suite.agents.endpoint import EndpointAgent, outcome_of
from rlhf_suite.agents.episodes import with_outcome
from rlhf_suite.data.generation import Generation, SamplingSettings
from rlhf_suite.data.trajectory import ENVIRONMENT, MODEL, to_batch
from rlhf_suite.rewards.base import Choice, RewardFailure, Scored
from rlhf_suite.serving import chat_server, http_server
from rlhf_suite.serving.chat_server import ChatServer

pytestmark = pytest.mark.stack

# Without the certificates of https, which would be read again for each request.
get, post = partial(httpx.get, verify=False), partial(httpx.post, verify=False)
TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": 2}}\n</tool_call>'


class Model:
    """Writes `reply(prompt)`, each token with a log-prob that no other token has. `gate` holds it back."""

    def __init__(self, tokenizer, reply) -> None:
        self.tokenizer, self.reply, self.gate = tokenizer, reply, None
        self.written: list[float] = []
        self.asked: list[list[int]] = []

    async def generate(self, request) -> Generation:
        self.asked.append(list(request.prompt_ids))
        if self.gate is not None:
            await self.gate.wait()
        text = self.reply(self.tokenizer.decode(request.prompt_ids))
        ids = [*self.tokenizer(text, add_special_tokens=False)["input_ids"], request.sampling.stop_token_ids[0]]
        reason = "stop" if len(ids) <= request.max_new_tokens else "length"
        ids = ids[: request.max_new_tokens]
        log_probs = np.array([-(len(self.written) + n + 1) / 1024 for n in range(len(ids))], np.float32)
        self.written += log_probs.tolist()
        return Generation(request.id, np.array(ids, np.int32), log_probs, reason, np.zeros(len(ids), np.int32))


@pytest.fixture(scope="module")
def server():
    return ChatServer("127.0.0.1")


@pytest.fixture
def play(tokenizer, server):
    """Run an episode of a program; return it and its ledgers as they are trained on."""

    def played(program, model, *, max_turns=50, timeout_s=600.0, must_score=False, **limits):
        async def episode():
            agent = EndpointAgent(program, server, max_turns, timeout_s, 10**5, must_score=must_score)
            return await agent.run(task, open_session(tokenizer, model, task, parser="hermes", **limits))

        task = chat_task(tokenizer)
        found = asyncio.run(asyncio.wait_for(episode(), HOURS_S))
        return found, with_outcome(found)

    return played


def echo(prompt: str) -> str:
    return f"answer {prompt.count('user')}"


def user(text: str) -> dict:
    return {"role": "user", "content": text}


def client(base_url: str, api_key: str, **more):
    from openai import OpenAI  # seconds, which other files of tests need not wait

    return OpenAI(base_url=base_url, api_key=api_key, **more)


def ask(base_url: str, api_key: str, messages: list, headers=None, **more) -> httpx.Response:
    body = {"model": "policy", "messages": messages, **more}
    head = {"authorization": f"Bearer {api_key}"} | (headers or {})
    return post(f"{base_url}/chat/completions", json=body, headers=head, timeout=30)


def trained(ledgers) -> list[float]:
    batch = to_batch(ledgers)
    return sorted(batch.engine_log_probs[batch.mask.bool()].tolist())


@pytest.mark.notices(
    "an answer has the log-probs of other tokens",
    "agents/endpoint.py",
    "branch.ledger.engine_log_probs[-len(turn.ids) :].tolist()",
    "branch.ledger.engine_log_probs[: len(turn.ids)].tolist()",
)
def test_a_conversation_is_one_ledger_and_its_tokens_are_those_of_the_engine(play, tokenizer):
    answers = []

    def run_agent(task, base_url, api_key):
        messages = list(task.messages)
        for _ in range(3):
            answer = client(base_url, api_key).chat.completions.create(
                model="any", messages=messages, logprobs=True, max_tokens=40
            )
            answers.append(answer)
            messages += [answer.choices[0].message.model_dump(exclude_none=True), user("go on")]
        return 0.5

    model = Model(tokenizer, echo)
    episode, ledgers = play(run_agent, model)
    assert [a.choices[0].message.content for a in answers] == ["answer 1", "answer 2", "answer 3"]
    (ledger,) = ledgers
    assert (ledger.reward, ledger.score, len(ledger.turns)) == (0.5, 0.5, 3)
    for answer, prompt, turn in zip(answers, model.asked, ledger.turns, strict=True):
        assert answer.prompt_token_ids == prompt and answer.choices[0].token_ids == turn.tolist()
        assert answer.choices[0].finish_reason == "stop"
        assert answer.usage.prompt_tokens == len(prompt)
    said = [token.logprob for answer in answers for token in answer.choices[0].logprobs.content]
    assert said == model.written == ledger.engine_log_probs[ledger.owner == MODEL].tolist()
    assert list(model.asked[2]) == ledger.ids[: len(model.asked[2])].tolist()
    metrics = {name.removeprefix("agent/"): value for name, value in ledger.extra.items()}
    assert metrics == {
        "turns": 3,
        "calls": 0,
        "malformed_calls": 0,
        "ledgers": 1,
        "orphans": 0,
        "retries": 0,
    }
    assert episode.ending == "finished"


def test_tools_are_called_and_their_answers_follow_in_the_same_ledger(play, tokenizer):
    from openai import AsyncOpenAI

    seen = []

    async def run_agent(task, base_url, api_key):
        messages = list(task.messages)
        async with AsyncOpenAI(base_url=base_url, api_key=api_key) as model:
            first = await model.chat.completions.create(model="m", messages=messages, tools=[TOOL], tool_choice="auto")
            message = first.choices[0].message
            (call,) = message.tool_calls
            seen.append((first.choices[0].finish_reason, call.function.name, json.loads(call.function.arguments)))
            messages += [message, {"role": "tool", "tool_call_id": call.id, "content": "3"}]
            second = await model.chat.completions.create(model="m", messages=messages, tools=[TOOL])
            seen.append(second.choices[0].message.content)
        return {"reward": 1, "score": 0.25, "metrics": {"sum": 3}}

    model = Model(tokenizer, lambda prompt: "done" if "tool\n" in prompt else f"so <think>\n{CALL}")
    _, (ledger,) = play(run_agent, model)
    assert seen == [("tool_calls", "add", {"a": 1, "b": 2}), "done"]
    assert (ledger.reward, ledger.score, ledger.extra["sum"], ledger.extra["agent/calls"]) == (1.0, 0.25, 3.0, 1.0)
    assert "<|im_start|>tool\n3<|im_end|>" in tokenizer.decode(ledger.ids) and len(ledger.turns) == 2


def test_calls_that_cannot_be_read_or_may_not_be_made_are_text(play, tokenizer):
    seen = []

    def run_agent(task, base_url, api_key):
        for more in ({"tools": [TOOL], "tool_choice": "none"}, {"tools": [TOOL]}):
            choice = ask(base_url, api_key, [*task.messages, user(str(len(seen)))], **more).json()["choices"][0]
            seen.append((choice["message"].get("tool_calls"), choice["message"]["content"]))
            again = [*task.messages, user(str(len(seen) - 1)), {"role": "assistant", "content": seen[-1][1]}, user("?")]
            ask(base_url, api_key, again, **more)
        return 1.0

    model = Model(tokenizer, lambda prompt: CALL if prompt.count("user") == 2 and "\n0<" in prompt else "<tool_call>{x")
    _, ledgers = play(run_agent, model)
    assert seen == [(None, CALL), (None, "<tool_call>{x")]
    assert [len(ledger.turns) for ledger in ledgers] == [2, 2], "what was sent is known again"
    assert ledgers[-1].extra["agent/malformed_calls"] == 3


@pytest.mark.parametrize("reply", ["hello", CALL])
def test_a_stream_says_what_an_answer_says(play, tokenizer, reply):
    found = []

    def run_agent(task, base_url, api_key):
        stream = client(base_url, api_key).chat.completions.create(
            model="m", messages=task.messages, tools=[TOOL], stream=True, stream_options={"include_usage": True}
        )
        chunks = list(stream)
        found.append(chunks)
        return 0.0

    _, (ledger,) = play(run_agent, Model(tokenizer, lambda prompt: reply))
    first, last, usage = found[0]
    assert usage.usage.completion_tokens == len(ledger.turns[0])
    assert first.choices[0].token_ids == ledger.turns[0].tolist()
    assert last.choices[0].finish_reason == ("stop" if reply == "hello" else "tool_calls")
    if reply == "hello":
        assert first.choices[0].delta.content == "hello"
    else:
        assert json.loads(first.choices[0].delta.tool_calls[0].function.arguments) == {"a": 1, "b": 2}


def test_other_tools_are_another_prompt_and_so_another_ledger(play, tokenizer):
    def run_agent(task, base_url, api_key):
        first = ask(base_url, api_key, task.messages, tools=[TOOL]).json()["choices"][0]["message"]
        then = [*task.messages, first, user("one")]
        second = ask(base_url, api_key, then, tools=[TOOL]).json()["choices"][0]["message"]
        ask(base_url, api_key, [*then, second, user("two")])
        return 1.0

    _, ledgers = play(run_agent, Model(tokenizer, echo))
    assert [len(ledger.turns) for ledger in ledgers] == [2, 1]
    assert not (ledgers[1].owner == ENVIRONMENT).any() and MODEL not in ledgers[1].owner[: -len(ledgers[1].turns[0])]


def test_coroutine_functions_share_one_event_loop_from_episode_to_episode(play, tokenizer):
    """What they keep between episodes, such as a client of a judge, belongs to the loop on which it was made."""
    loops = []

    async def run_agent(task, base_url, api_key):
        loops.append(asyncio.get_running_loop())
        await asyncio.to_thread(ask, base_url, api_key, task.messages)
        return 1.0

    for _ in range(3):
        play(run_agent, Model(tokenizer, echo))
    assert len(loops) == 3 and len(set(loops)) == 1


def test_a_coroutine_function_that_blocks_stops_nobody(tokenizer, server):
    """The first program waits, without awaiting, until the second one has had its turn."""
    done = Event()

    async def run_agent(task, base_url, api_key):
        if task.label == "blocks":
            waited = done.wait(300)
        ask(base_url, api_key, task.messages)
        if task.label == "blocks":
            return float(waited)
        done.set()
        return 1.0

    async def both():
        agent = EndpointAgent(run_agent, server, 9, 600.0, 10**5)
        tasks = [chat_task(tokenizer, label=label) for label in ("blocks", "asks")]
        return await asyncio.gather(*(agent.run(t, open_session(tokenizer, Model(tokenizer, echo), t)) for t in tasks))

    assert [episode.outcome.reward for episode in asyncio.run(both())] == [1.0, 1.0]


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


def said_by_call(arguments: str) -> dict:
    function = {"name": "add", "arguments": arguments}
    return {"role": "assistant", "content": "", "tool_calls": [{"id": "c", "type": "function", "function": function}]}


def status_of(response: httpx.Response) -> tuple[int, str]:
    return response.status_code, response.json()["error"]["message"]


@pytest.mark.notices(
    "a program may sample at a temperature of its own",
    "agents/chat.py",
    "if value != own[name] and not",
    "if False and not",
)
@pytest.mark.notices(
    "tools of any size are shown to the model",
    "agents/chat.py",
    "if (count := len(json.dumps(given))) > MAX_TOOLS:",
    "if (count := len(json.dumps(given))) < 0:",
)
@pytest.mark.notices(
    "half a surrogate pair in a call reaches the tokenizer",
    "agents/chat.py",
    "    check_characters(arguments, where)\n",
    "",
)
@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"temperature": 0.3}, "temperature=0.3: this run samples with 1 (rollout.temperature"),
        ({"top_p": 0.5}, "rollout.top_p"),
        ({"n": 2}, "n=2"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"logit_bias": {"5": 1}}, "logit_bias"),
        ({"seed": 3}, "seed is not supported"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"max_tokens": 0}, "max_tokens=0"),
        ({"stop": [""]}, "stop must be"),
        ({"tools": [{"name": "x"}]}, "each of tools"),
        ({"tools": [TOOL | {"more": "x" * 100_000}]}, "characters of JSON, more than 100000"),
        ({"messages": []}, "messages must be a list"),
        ({"messages": [{"role": "function", "content": ""}]}, "messages[0] must have the role"),
        ({"messages": [user("x"), {"role": "assistant", "content": "y"}]}, "is of the assistant"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]}, "images"),
        ({"messages": [{"role": "user", "content": "\ud800"}]}, "surrogate"),
        ({"stop": "\ud800"}, "surrogate"),
        ({"tools": [TOOL | {"more": "\ud800"}]}, "surrogate"),
        ({"messages": [said_by_call('{"x": "\\ud800"}'), user("x")]}, "messages[0] holds half of a surrogate"),
    ],
)
def test_a_request_that_asks_for_something_else_is_refused_by_name(more, said):
    with pytest.raises(Refused) as refused:
        read_request({"messages": [user("x")], **more}, SamplingSettings())
    assert said in refused.value.message and refused.value.status == 400


def test_what_does_nothing_may_be_in_a_request():
    body = {"temperature": 1.0, "top_k": 0, "n": 1, "logit_bias": {}, "seed": None, "user": "me", "stop": "x"}
    request = read_request({"messages": [user("x")], **body}, SamplingSettings())
    assert (request.stop, request.max_tokens, request.streams) == (("x",), None, False)


@pytest.mark.notices(
    "a session answers whoever has no key of it",
    "serving/chat_server.py",
    'if not hmac.compare_digest(given, f"Bearer {chat.key}".encode()):',
    "if False:",
)
@pytest.mark.notices(
    "all episodes have the same URL",
    "agents/endpoint.py",
    "self.id, self.key = secrets.token_hex(8),",
    'self.id, self.key = 16 * "0",',
)
def test_errors_reach_the_client_as_those_of_openai(play):
    import openai

    found = []

    def run_agent(task, base_url, api_key):
        for key, more in ((api_key, {"temperature": 0.5}), ("wrong", {})):
            try:
                client(base_url, key).chat.completions.create(model="m", messages=task.messages, **more)
            except openai.APIStatusError as error:
                found.append((type(error), error.status_code))
        found.append(status_of(post(f"{base_url}/chat/completions", content=b"{", headers=head(api_key))))
        missing = base_url.replace(base_url.split("/")[4], "0" * 16)
        found.append(status_of(ask(missing, api_key, task.messages))[0])
        return 1.0

    _, (ledger,) = play(run_agent, None)
    assert found[:2] == [(openai.BadRequestError, 400), (openai.AuthenticationError, 401)]
    assert found[2][0] == 400 and "not JSON" in found[2][1] and found[3] == 404
    assert not ledger.model_mask.any()


def head(api_key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {api_key}"}


@pytest.mark.notices(
    "a body of any size is read",
    "serving/chat_server.py",
    "read_request(parse_body(await body_of(request, MAX_BYTES)), ",
    "read_request(parse_body(await body_of(request, MAX_BYTES << 10)), ",
)
@pytest.mark.notices(
    "a conversation that is far too long is tokenised",
    "agents/endpoint.py",
    "if count > self.max_characters:",
    "if False:",
)
@pytest.mark.notices(
    "messages without text and calls may be endless",
    "agents/endpoint.py",
    'return 1 + len(str(message["content"])) + sum(map(len, map(repr, calls)))',
    'return len(str(message["content"]))',
)
def test_a_huge_body_is_not_read_and_a_long_text_not_tokenised(play, tokenizer):
    found = []

    def run_agent(task, base_url, api_key):
        with pytest.raises(Exception, match=r"413|[Bb]roken|reset|disconnect"):
            huge = post(f"{base_url}/chat/completions", content=b" " * (17 << 20), headers=head(api_key))
            raise AssertionError(huge.status_code)
        called = said_by_call(json.dumps({"x": "y" * 200_000}))
        long = [user("x" * 200_000)], [user("")] * 200_001, [user(""), called, user("")], [user("word " * 9000)]
        for messages in long:
            error = ask(base_url, api_key, messages).json()["error"]
            found.append((error["code"], "characters" in error["message"]))
        return 1.0

    assert chat_server.MAX_BYTES == 16 << 20
    play(run_agent, Model(tokenizer, echo))
    assert found == [("context_length_exceeded", is_seen) for is_seen in (True, True, True, False)]


@pytest.mark.notices(
    "a client that sends slowly keeps its connection",
    "serving/http_server.py",
    "self.loop.call_later(READ_S, self.end)",
    "self.loop.call_later(READ_S * 1000, self.end)",
)
def test_a_client_that_sends_slowly_is_closed_and_holds_nobody_up(play, tokenizer, monkeypatch):
    monkeypatch.setattr(http_server, "READ_S", 5.0)  # of uvicorn's own loop, whose clock cannot be put forward
    found = []

    def run_agent(task, base_url, api_key):
        host, port = base_url.split("/")[2].split(":")
        with socket.create_connection((host, int(port)), timeout=300) as slow:
            slow.sendall(b"POST /sessions/x/v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 9\r\n")
            found.append(ask(base_url, api_key, task.messages).status_code)
            found.append(slow.recv(100))
        return 1.0

    play(run_agent, Model(tokenizer, echo))
    assert found == [200, b""]


@pytest.mark.notices(
    "an episode that is over gets further turns", "agents/endpoint.py", "            self.sessions.close(chat)\n", ""
)
def test_64_sessions_at_the_same_time_keep_their_conversations_apart(tokenizer, server):
    def run_agent(task, base_url, api_key):
        messages = [user(f"number {task.label}")]
        for _ in range(3):
            messages.append(ask(base_url, api_key, messages).json()["choices"][0]["message"])
            messages.append(user("go on"))
        return float(task.label)

    def reply(prompt: str) -> str:
        return f"{prompt.split('number ')[1].split('<', maxsplit=1)[0]}.{prompt.count('user')}"

    async def all_of_them():
        agent = EndpointAgent(run_agent, server, 9, 600.0, 10**5)
        tasks = [chat_task(tokenizer, label=str(number)) for number in range(64)]
        sessions = [open_session(tokenizer, Model(tokenizer, reply), task) for task in tasks]
        return await asyncio.gather(*map(agent.run, tasks, sessions))

    episodes = asyncio.run(asyncio.wait_for(all_of_them(), 120))
    for number, episode in enumerate(episodes):
        (ledger,) = episode.ledgers
        assert [tokenizer.decode(turn[:-1]) for turn in ledger.turns] == [f"{number}.{n}" for n in (1, 2, 3)]
        assert episode.outcome == Scored(number, number)
    assert not server.sessions


@pytest.mark.notices(
    "a reward that comes over HTTP is lost",
    "agents/endpoint.py",
    "outcome = chat.report if returned is None",
    "outcome = None if returned is None",
)
def test_a_result_may_come_over_http(play, tokenizer):
    found = []

    def run_agent(task, base_url, api_key):
        url = base_url.removesuffix("/v1") + "/complete"
        found.append(status_of(post(url, json={"reward": "much"}, headers=head(api_key))))
        found.append(post(url, json={"reward": 2, "metrics": {"x": 1}}, headers=head(api_key)).status_code)
        found.append(get(f"{base_url}/models", headers=head(api_key)).json()["data"][0]["id"])
        found.append(get(base_url.split("/sessions")[0] + "/health").json())
        ask(base_url, api_key, task.messages)

    episode, _ = play(run_agent, Model(tokenizer, echo), must_score=True)
    assert found == [(400, "reward='much', not a finite number"), 200, "policy", {"status": "ok"}]
    assert isinstance(episode.outcome, Scored) and episode.outcome.reward == 2 and episode.outcome.extra == {"x": 1}


@pytest.mark.parametrize(
    ("result", "outcome"),
    [
        (True, Scored(1.0, 1.0)),
        (None, None),
        ({"reward": 2, "score": 0.5}, Scored(2.0, 0.5)),
        ({"error": "no container"}, RewardFailure("no container", "error")),
        ({"reward": {"right": 1, "short": 0.5}, "score": 1}, Scored(1.5, 1.0, {"right": 1.0, "short": 0.5})),
    ],
)
def test_results(result, outcome):
    assert outcome_of(result, Choice()) == outcome


def test_one_part_of_a_reward_may_be_chosen():
    assert outcome_of({"reward": {"right": 1, "short": 0.5}}, Choice("short")).reward == 0.5
    with pytest.raises(ValueError, match=r"reward.reward_key=long"):
        outcome_of({"reward": {"right": 1}}, Choice("long"))


@pytest.mark.parametrize("result", [{"rewrad": 1}, float("nan"), "1", {"score": 1}, {"reward": 1, "metrics": 3}])
def test_results_that_are_none(result):
    with pytest.raises(ValueError):
        outcome_of(result, Choice())


def test_an_error_of_the_program_is_a_failure_and_no_reward_is_one_where_nobody_else_scores(play, tokenizer):
    def broken(task, base_url, api_key):
        raise KeyError("x")

    def silent(task, base_url, api_key):
        ask(base_url, api_key, task.messages)

    episode, _ = play(broken, None)
    assert re.fullmatch(r"run_agent failed: test_endpoint\.py:\d+: KeyError: 'x'", episode.outcome.reason)
    assert play(silent, Model(tokenizer, echo))[0].outcome is None
    episode, _ = play(silent, Model(tokenizer, echo), must_score=True)
    assert isinstance(episode.outcome, RewardFailure) and "no reward" in episode.outcome.reason


@pytest.mark.notices(
    "a reward without a turn of the model counts",
    "agents/endpoint.py",
    "and not chat.session.num_turns and",
    "and chat.session.num_turns < 0 and",
)
def test_a_reward_without_a_turn_is_a_failure_and_not_a_silent_run_that_learns_nothing(play, tokenizer):
    def elsewhere(task, base_url, api_key):
        return 1.0

    def refused(task, base_url, api_key):
        assert ask(base_url, api_key, task.messages, temperature=0.0).status_code == 400
        return 0.0

    for program, said in (
        (elsewhere, "its requests must go to base_url"),
        (refused, "the endpoint had said: .*temperature"),
    ):
        episode, _ = play(program, None)
        assert episode.ending == "failed" and episode.outcome.kind == "error"
        assert re.fullmatch(
            f"run_agent returned a reward without a turn of the model; {said}.*", episode.outcome.reason
        )


@pytest.mark.notices(
    "a program that a limit ended ends the run",
    "agents/endpoint.py",
    "chat.limit, Scored(0.0, 0.0) if self.must_score else None",
    "chat.limit, outcome if self.must_score else None",
)
@pytest.mark.parametrize(("more", "ending"), [({"max_turns": 2}, "turns"), ({"max_len": 60}, "cut")])
def test_a_program_that_stops_at_a_limit_is_not_a_failure(play, tokenizer, more, ending):
    """Where reward sources score it. One that catches the error may go on, for example with a shorter history."""

    def run_agent(task, base_url, api_key):
        messages = list(task.messages)
        while True:
            answer = client(base_url, api_key).chat.completions.create(model="m", messages=messages)
            messages += [answer.choices[0].message.model_dump(exclude_none=True), user("go on")]

    episode, ledgers = play(run_agent, Model(tokenizer, echo), **more)
    assert (episode.ending, episode.outcome) == (ending, None) and len(ledgers[-1].turns) >= 1
    assert ledgers[-1].truncated is (ending == "cut")
    alone = play(run_agent, Model(tokenizer, echo), must_score=True, **more)[0]
    assert (alone.ending, alone.outcome) == (ending, Scored(0.0, 0.0)), "nobody had paid until then"


@pytest.mark.parametrize("must_score", [True, False])
def test_a_program_whose_first_request_has_no_room_has_no_reward(play, tokenizer, must_score):
    def run_agent(task, base_url, api_key):
        client(base_url, api_key).chat.completions.create(model="m", messages=[user("word " * 9000)])

    failure = play(run_agent, Model(tokenizer, echo), must_score=must_score)[0].outcome
    assert isinstance(failure, RewardFailure) and "BadRequestError" in failure.reason


def test_a_program_that_goes_on_behind_a_limit_may_still_fail(play, tokenizer):
    def run_agent(task, base_url, api_key):
        assert ask(base_url, api_key, [user("word " * 9000)]).status_code == 400
        assert ask(base_url, api_key, task.messages).status_code == 200
        raise ValueError("something else")

    failure = play(run_agent, Model(tokenizer, echo))[0].outcome
    assert re.fullmatch(r"run_agent failed: test_endpoint\.py:\d+: ValueError: something else", failure.reason)


def test_a_program_that_takes_too_long_has_no_reward_and_is_answered_no_more(play, tokenizer, clock):
    is_over, late = Event(), Future[int]()

    def run_agent(task, base_url, api_key):
        ask(base_url, api_key, task.messages)
        clock.forward(601.0)
        is_over.wait()
        late.set_result(ask(base_url, api_key, task.messages).status_code)

    episode, _ = play(run_agent, Model(tokenizer, echo), timeout_s=600.0)
    assert isinstance(episode.outcome, RewardFailure) and episode.outcome.kind == "timeout"
    assert "agent.timeout_s=600 (1 turns)" in episode.outcome.reason
    is_over.set()
    assert late.result(300) == 404


@pytest.mark.notices(
    "a failure of the engines is one of the program",
    "agents/endpoint.py",
    "            if chat.failed.done():\n                raise\n",
    "",
)
def test_a_failure_of_the_engines_ends_the_run(play, tokenizer):
    class Broken(Exception):
        pass

    def reply(prompt):
        raise Broken("the engine is gone")

    with pytest.raises(Broken):
        play(lambda task, base_url, api_key: ask(base_url, api_key, task.messages), Model(tokenizer, reply))


@pytest.mark.notices(
    "a program names as many metrics as it likes",
    "agents/endpoint.py",
    '    check_names("the program", name, given)\n',
    "",
)
@pytest.mark.parametrize("names", [["a\x1b[2J"], ["n" * 101], [""], [f"m{n}" for n in range(257)]])
@pytest.mark.parametrize("place", ["metrics", "reward"])
def test_names_of_metrics_are_few_short_and_visible(names, place):
    given = {"reward": 1.0} | {place: dict.fromkeys(names, 1.0)}
    with pytest.raises(ValueError, match="the program returned"):
        outcome_of(given, Choice())
