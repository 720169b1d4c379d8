"""Requests that are refused, huge, slow or many at a time."""

from __future__ import annotations

import asyncio
import json
import socket

import pytest
from endpoint_episodes import (
    TOOL,
    Model,
    ask,
    client,
    echo,
    head,
    post,
    said_by_call,
    status_of,
    user,
)
from scripted import chat_task, open_session

from rlhf_suite.agents.chat import read
from rlhf_suite.agents.endpoint import EndpointAgent
from rlhf_suite.agents.request import Refused, Wishes
from rlhf_suite.data.generation import SamplingSettings
from rlhf_suite.rewards.base import Scored
from rlhf_suite.serving import chat_server, http_server

pytestmark = pytest.mark.stack


@pytest.mark.notices(
    "a program may sample at a temperature of its own",
    "agents/request.py",
    "if not is_same:",
    "if False:",
)
@pytest.mark.notices(
    "tools of any size are shown to the model",
    "agents/request.py",
    "if (count := len(json.dumps(given))) > MAX_TOOLS:",
    "if (count := len(json.dumps(given))) < 0:",
)
@pytest.mark.notices(
    "half a surrogate pair in a call reaches the tokenizer",
    "agents/request.py",
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
        read({"messages": [user("x")], **more}, Wishes(SamplingSettings()))
    assert said in refused.value.message and refused.value.status == 400


def test_what_does_nothing_may_be_in_a_request():
    body = {"temperature": 1.0, "top_k": 0, "n": 1, "logit_bias": {}, "seed": None, "user": "me", "stop": "x"}
    request = read({"messages": [user("x")], **body}, Wishes(SamplingSettings()))
    assert (request.stop, request.max_tokens, request.streams) == (("x",), None, False)


@pytest.mark.notices(
    "a session answers whoever has no key of it",
    "serving/chat_server.py",
    "if not hmac.compare_digest(given.encode(), chat.key.encode()):",
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


@pytest.mark.notices(
    "a body of any size is read",
    "serving/chat_server.py",
    "body = parse_body(await body_of(request, MAX_BYTES))",
    "body = parse_body(await body_of(request, MAX_BYTES << 10))",
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
    'return 1 + len(str(message["content"])) + thoughts',
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
    "self.loop.call_later(READ_S, self.end_if_late)",
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
