"""The HTTP server of one route: who is let in, what is too large, what a mistake is told; and requests joined."""

from __future__ import annotations

import asyncio
import socket
import threading
import time

import httpx
import pytest

from rlhf_suite.launch.batcher import Batcher
from rlhf_suite.launch.http_server import BadRequest, listening, make_app, with_token


async def echo(body):
    if "x" not in body:
        raise BadRequest("no x")
    return {"x": body["x"]}


def asked(app, *requests):
    """The responses to requests (method, path, keyword arguments)."""

    async def ask():
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app=app), base_url="http://a") as client:
            return [await client.request(method, path, **kwargs) for method, path, kwargs in requests]

    return asyncio.run(ask())


def app_of(token=None, max_bytes=1000):
    app = make_app("/get", echo, {"status": "ok"}, None, max_bytes)
    with_token(app, token)
    return app


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


def test_a_request_beyond_the_limit_is_not_read():
    small, large = asked(
        app_of(max_bytes=20), ("POST", "/get", {"json": {"x": 1}}), ("POST", "/get", {"json": {"x": "1" * 20}})
    )
    assert small.status_code == 200
    assert large.status_code == 413 and "20 bytes" in large.json()["error"]


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
    with listening("127.0.0.1", 0) as one, pytest.raises(OSError):
        listening("127.0.0.1", one.getsockname()[1])
    with listening("::1", 0) if socket.has_ipv6 else listening("127.0.0.1", 0) as other:
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


def test_concurrent_requests_share_calls_and_each_gets_its_own_answers():
    calls = []

    def score(sequences):
        calls.append([len(ids) for ids in sequences])
        return [float(sum(ids)) for ids in sequences]

    answers = batched([[[1], [2, 2]], [[3]], [], [[4], [5], [6]]], score)
    assert answers == [[1, 4], [3], [], [4, 5, 6]]
    assert calls == [[1, 2, 1, 1], [1, 1]]


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
    assert isinstance(first, RuntimeError) and "MemoryError: too much" in str(first)
    assert second == [1.0]


def test_the_next_batch_gathers_while_one_is_computed():
    calls, go_on = [], threading.Event()

    def score(sequences):
        calls.append(len(sequences))
        go_on.wait(5)
        return [0.0] * len(sequences)

    async def work():
        batcher = Batcher(score, 10, 100)
        running = asyncio.create_task(batcher.run())
        requests = [asyncio.create_task(batcher.submit([[1]]))]
        deadline = time.monotonic() + 5
        while not calls and time.monotonic() < deadline:
            await asyncio.sleep(0.01)
        requests += [asyncio.create_task(batcher.submit([[1]])) for _ in range(5)]
        await asyncio.sleep(0)
        go_on.set()
        await asyncio.gather(*requests)
        running.cancel()

    asyncio.run(work())
    assert calls == [1, 5]
