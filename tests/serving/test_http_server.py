"""The HTTP server of one route: who is let in, what is too large, what a mistake is told; and requests joined."""

from __future__ import annotations

import asyncio
import socket
import threading

import httpx
import pytest

from rlhf_suite.config.declarations.tools import ServeConfig
from rlhf_suite.errors import UserError
from rlhf_suite.serving.batcher import Batcher
from rlhf_suite.serving.chat_server import ChatServer
from rlhf_suite.serving.http_server import BadRequest, Guard, listen, make_app, open_listening_socket


async def echo(body, client):
    if "x" not in body:
        raise BadRequest("no x")
    return {"x": body["x"]}


def asked(app, *requests):
    """The responses to requests (method, path, keyword arguments)."""

    async def ask():
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app=app), base_url="http://localhost") as client:
            return [await client.request(method, path, **kwargs) for method, path, kwargs in requests]

    return asyncio.run(ask())


def app_of(token=None, max_bytes=1000):
    return Guard(make_app("/get", echo, None, max_bytes), token)


def test_a_handler_answers_and_its_complaints_reach_the_caller():
    good, wrong, no_json, a_list = asked(
        app_of(),
        ("POST", "/get", {"json": {"x": 1}}),
        ("POST", "/get", {"json": {}}),
        ("POST", "/get", {"content": b"{"}),
        ("POST", "/get", {"json": [1]}),
    )
    assert (good.status_code, good.json()) == (200, {"x": 1})
    assert (wrong.status_code, wrong.json()) == (422, {"error": "no x"})
    assert no_json.status_code == a_list.status_code == 422
    assert "JSON object" in a_list.json()["error"]


@pytest.mark.notices(
    "an address that is not of this machine is blamed on the port",
    "serving/http_server.py",
    "if error.errno in ABOUT_PORTS else",
    "if error.errno else",
)
@pytest.mark.parametrize("host", ["", "192.0.2.1", "a..b", "no-such-host.invalid", "[::1]"])
def test_an_address_that_is_not_of_this_machine_is_one_sentence(host):
    with pytest.raises(UserError) as refused:
        listen(ServeConfig.of("serve_rm", host=host, port=0))
    said = str(refused.value)
    assert said.startswith(f"serve.host={host} serve.port=0: ") and said.endswith("127.0.0.1, in serve.host")
    assert "while attempting" not in said
    with pytest.raises(UserError, match=r"127\.0\.0\.1, in agent\.host$"):
        ChatServer(host).start()


def test_a_port_that_is_taken_is_named_with_the_remedy():
    with open_listening_socket("127.0.0.1", 0) as first:
        port = first.getsockname()[1]
        with pytest.raises(UserError) as refused:
            listen(ServeConfig.of("serve_rm", host="127.0.0.1", port=port))
    problem = f"serve.host=127.0.0.1 serve.port={port}: Address already in use"
    assert str(refused.value) == f"{problem}. Choose another serve.port, or 0"


def test_a_request_beyond_the_limit_is_not_read():
    small, large = asked(
        app_of(max_bytes=20), ("POST", "/get", {"json": {"x": 1}}), ("POST", "/get", {"json": {"x": "1" * 20}})
    )
    assert small.status_code == 200
    assert large.status_code == 413 and "20 bytes" in large.json()["error"]


@pytest.mark.notices(
    "any bearer token opens a server",
    "serving/http_server.py",
    "not hmac.compare_digest(token_in(headers), self.expected)",
    'not headers.get(b"authorization", b"").startswith(b"Bearer ")',
)
@pytest.mark.parametrize("given", [None, "Bearer wrong", "s3cret", "Bearer \u00e4"])
def test_without_the_token_only_health_answers(given):
    headers = {} if given is None else {"Authorization": given.encode()}
    refused, health, let_in = asked(
        app_of(token="s3cret"),
        ("POST", "/get", {"json": {"x": 1}, "headers": headers}),
        ("GET", "/health", {"headers": headers}),
        ("POST", "/get", {"json": {"x": 1}, "headers": {"Authorization": "Bearer s3cret"}}),
    )
    assert refused.status_code == 401 and "x" not in refused.json()
    assert (health.status_code, health.json()) == (200, {"status": "ok"})
    assert let_in.status_code == 200


def test_a_taken_port_is_an_error_and_port_0_takes_a_free_one():
    with open_listening_socket("127.0.0.1", 0) as one, pytest.raises(OSError):
        open_listening_socket("127.0.0.1", one.getsockname()[1])
    with open_listening_socket("::1", 0) if socket.has_ipv6 else open_listening_socket("127.0.0.1", 0) as other:
        assert other.getsockname()[1] > 0


def batched(requests, score, max_rows=4, max_tokens=100):
    """The answers to concurrent requests, or what was raised."""

    async def work():
        batcher = Batcher(score, max_rows, max_tokens)
        running = asyncio.create_task(batcher.run())
        try:
            return await asyncio.gather(*[batcher.submit(each) for each in requests], return_exceptions=True)
        finally:
            running.cancel()

    return asyncio.run(work())


@pytest.mark.notices(
    "a call takes one text more than it may",
    "serving/batcher.py",
    "len(batch) < self.max_rows",
    "len(batch) <= self.max_rows",
)
@pytest.mark.notices(
    "requests of a client are answered one after another", "serving/batcher.py", "        requests.rotate(-1)\n", ""
)
def test_concurrent_requests_share_calls_and_each_gets_its_own_answers():
    calls = []

    def score(sequences):
        calls.append([len(ids) for ids in sequences])
        return [float(sum(ids)) for ids in sequences]

    answers = batched([[[1], [2, 2]], [[3]], [], [[4], [5], [6]]], score)
    assert answers == [[1, 4], [3], [], [4, 5, 6]]
    assert calls == [[1, 1, 1, 2], [1, 1]]


def turns(requests, max_rows):
    """The first numbers of each call's sequences; requests are (client, sequences), all there before the first call."""
    calls = []

    def score(sequences):
        calls.append([ids[0] for ids in sequences])
        return [0.0] * len(sequences)

    async def work():
        batcher = Batcher(score, max_rows, 100)
        waiting = [asyncio.create_task(batcher.submit(sequences, client)) for client, sequences in requests]
        await asyncio.sleep(0)
        running = asyncio.create_task(batcher.run())
        await asyncio.gather(*waiting)
        running.cancel()

    asyncio.run(work())
    return calls


@pytest.mark.notices(
    "the client that came first has all turns",
    "serving/batcher.py",
    "        self.waiting[client] = requests\n",
    "        self.waiting = {client: requests, **self.waiting}\n",
)
def test_a_long_request_does_not_make_others_wait():
    assert turns([("a", [[1], [1], [1], [1]]), ("b", [[2]])], 2) == [[1, 2], [1, 1], [1]]
    assert turns([("a", [[1], [1], [1], [1]]), ("a", [[2]])], 2) == [[1, 2], [1, 1], [1]]


def test_clients_have_equal_shares_however_many_requests_they_make():
    many = [("a", [[1]] * 3)] * 4
    calls = turns([*many, ("b", [[2], [2], [2]])], 2)
    assert calls[:3] == [[1, 2]] * 3 and sum(call.count(1) for call in calls) == 12


@pytest.mark.notices(
    "a page of any origin may use a server",
    "serving/http_server.py",
    'origin is not None and origin.partition(b"://")[2] != headers.get(b"host", b"")',
    "False",
)
@pytest.mark.parametrize(
    ("origin", "status"),
    [("http://evil.example", 403), ("null", 403), ("http://localhost", 200), ("http://localhost:8080", 403)],
)
@pytest.mark.parametrize("token", [None, "t"])
def test_a_web_page_of_another_origin_is_refused(origin, status, token):
    headers = {"Origin": origin, "Content-Type": "text/plain", "Authorization": "Bearer t"}
    (answer,) = asked(app_of(token=token), ("POST", "/get", {"content": b'{"x": 1}', "headers": headers}))
    assert answer.status_code == status


@pytest.mark.notices(
    "a call that would be exactly full is not filled",
    "serving/batcher.py",
    "tokens + len(item[0]) > self.max_tokens",
    "tokens + len(item[0]) >= self.max_tokens",
)
def test_a_call_holds_no_more_tokens_than_allowed_unless_one_text_alone_has_more():
    calls = []

    def score(sequences):
        calls.append([len(ids) for ids in sequences])
        return [0.0] * len(sequences)

    batched([[[0] * n for n in (3, 3, 9, 1, 2)]], score, max_tokens=6)
    assert calls == [[3, 3], [9], [1, 2]]


def test_a_call_that_fails_fails_those_in_it_alone():
    def score(sequences):
        if [7] in sequences:
            raise MemoryError("too much")
        return [1.0] * len(sequences)

    first, second = batched([[[7]], [[1]]], score, max_rows=1)
    assert repr(first) == "[MemoryError('too much')]"
    assert second == [1.0]


def test_a_sequence_that_fails_in_a_shared_call_fails_alone():
    calls = []

    def score(sequences):
        calls.append(len(sequences))
        if [7] in sequences:
            raise MemoryError("too much")
        return [1.0] * len(sequences)

    first, second = batched([[[1], [7]], [[2]]], score)
    assert repr(first) == "[1.0, MemoryError('too much')]"
    assert second == [1.0]
    assert calls == [3, 1, 1, 1]


def test_the_next_batch_gathers_while_one_is_computed():
    calls, began, go_on = [], threading.Event(), threading.Event()

    def score(sequences):
        calls.append(len(sequences))
        began.set()
        assert go_on.wait(60)
        return [0.0] * len(sequences)

    async def work():
        batcher = Batcher(score, 10, 100)
        running = asyncio.create_task(batcher.run())
        requests = [asyncio.create_task(batcher.submit([[1]]))]
        assert await asyncio.to_thread(began.wait, 60)
        requests += [asyncio.create_task(batcher.submit([[1]])) for _ in range(5)]
        await asyncio.sleep(0)
        go_on.set()
        await asyncio.gather(*requests)
        running.cancel()

    asyncio.run(work())
    assert calls == [1, 5]


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        (b'{"x": "\xff"}', "not UTF-8 (byte 7)"),
        (b'{"x": ' + b"[" * 200_000 + b"]" * 200_000 + b"}", "nested too deeply"),
        (b'{"x": ' + b"9" * 5000 + b"}", "too many digits"),
        (b'{"x": 1', "not JSON"),
        (b"", "not JSON"),
    ],
)
def test_a_body_that_cannot_be_read_is_the_callers_mistake_and_is_not_repeated(body, reason):
    (answer,) = asked(app_of(max_bytes=10**6), ("POST", "/get", {"content": body}))
    assert answer.status_code == 422
    assert reason in answer.json()["error"] and len(answer.content) < 100


@pytest.mark.notices(
    "a web page reaches a server without a token under a name of its own",
    "serving/http_server.py",
    "host_name(host) not in THIS_MACHINE",
    "not host_name(host)",
)
@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("localhost:5000", 200),
        ("127.0.0.1", 200),
        ("[::1]:5000", 200),
        ("LOCALHOST", 200),
        ("evil.example:5000", 421),
        ("127.0.0.1.evil.example", 421),
        ("", 421),
    ],
)
def test_without_a_token_only_names_of_this_machine_are_answered(host, status):
    request = {"json": {"x": 1}, "headers": {"Host": host}}
    answer, health = asked(app_of(), ("POST", "/get", request), ("GET", "/health", {"headers": {"Host": host}}))
    assert answer.status_code == health.status_code == status
    with_token = request | {"headers": {"Host": host, "Authorization": "Bearer t"}}
    (let_in,) = asked(app_of(token="t"), ("POST", "/get", with_token))
    assert let_in.status_code == 200
