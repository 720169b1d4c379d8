"""Connections to the HTTP server: clients that hang up, drip or stay, and how many there may be."""

from __future__ import annotations

import asyncio
from contextlib import suppress

import httpx
import pytest
from test_http_server import app_of

from clock import HOURS_S
from rlhf_suite.serving import http_server
from rlhf_suite.serving.http_server import Guard, make_app, open_listening_socket, server_of


def during(app, clients):
    """What `clients(port)` returns while a server of the app listens."""

    async def work():
        with open_listening_socket("127.0.0.1", 0) as listener:
            server = server_of(app)
            serving = asyncio.create_task(server.serve(sockets=[listener]))
            while not server.started:
                assert not serving.done()
                await asyncio.sleep(0.01)
            try:
                return await asyncio.wait_for(clients(listener.getsockname()[1]), HOURS_S)
            finally:
                server.should_exit = True
                await serving

    return asyncio.run(work())


HEAD = b"POST /get HTTP/1.1\r\nHost: localhost\r\n"


def whole(body):
    return HEAD + b"Content-Length: %d\r\n\r\n%s" % (len(body), body)


async def sent(port, text):
    """A connection on which `text` has been written."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(text)
    await writer.drain()
    return reader, writer


ASKED = whole(b'{"x": 1}')


async def answered(port, text=ASKED):
    """The status line of the answer to `text`."""
    reader, writer = await sent(port, text)
    line = await reader.readline()
    writer.close()
    return line.decode().strip()


def test_the_work_for_a_client_that_hangs_up_is_cancelled():
    cancelled, begun = asyncio.Event(), asyncio.Event()

    async def slow(body, client):
        begun.set()
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            cancelled.set()
            raise

    async def clients(port):
        _, writer = await sent(port, whole(b'{"x": 1}'))
        await begun.wait()
        writer.close()
        await cancelled.wait()

    during(Guard(make_app("/get", slow, None, 1000), None), clients)


@pytest.mark.parametrize("begun", [b"", b"POST /g", HEAD, HEAD + b"Content-Length: 9\r\n\r\n{"])
def test_a_connection_whose_request_does_not_arrive_in_time_is_closed(begun, monkeypatch, clock):
    monkeypatch.setattr(http_server, "READ_S", 60.0)

    async def clients(port):
        reader, writer = await sent(port, begun)
        closing = asyncio.create_task(reader.read())
        while not closing.done():  # the server may not have seen the connection yet
            clock.forward(61.0)
            await asyncio.sleep(0.01)
        with suppress(ConnectionResetError):
            assert await closing == b""
        writer.close()
        return await answered(port)

    assert during(app_of(), clients) == "HTTP/1.1 200 OK"


@pytest.mark.notices(
    "every byte of a request buys its connection more time",
    "serving/http_server.py",
    "        elif self.deadline is None:\n",
    "        else:\n            self.stop_watch()\n",
)
def test_bytes_that_drip_do_not_buy_time(monkeypatch, clock):
    monkeypatch.setattr(http_server, "READ_S", 60.0)

    async def clients(port):
        _, writer = await sent(port, HEAD)
        for _ in range(600):  # fewer than the longest head has
            if writer.is_closing():
                return True
            writer.write(b"X")
            clock.forward(1.0)
            await asyncio.sleep(0.02)
        return False

    assert during(app_of(), clients)


def test_a_slow_answer_is_not_cut_off_by_the_time_for_reading(monkeypatch, clock):
    monkeypatch.setattr(http_server, "READ_S", 60.0)

    async def slow(body, client):
        clock.forward(61.0)
        await asyncio.sleep(0.05)  # what is due by now happens before
        return {}

    assert during(Guard(make_app("/get", slow, None, 1000), None), answered) == "HTTP/1.1 200 OK"


def test_idle_connections_give_way_to_new_ones(monkeypatch):
    monkeypatch.setattr(http_server, "MAX_CONNECTIONS", 8)

    async def clients(port):
        idle = [await sent(port, HEAD) for _ in range(20)]
        lines = [await answered(port) for _ in range(3)]
        with suppress(ConnectionResetError):
            assert await idle[0][0].read() == b""
        return lines

    assert during(app_of(), clients) == ["HTTP/1.1 200 OK"] * 3


@pytest.mark.notices(
    "any number of requests may be under way",
    "serving/http_server.py",
    "if self.under_way >= MAX_CONNECTIONS:",
    "if self.under_way < 0:",
)
def test_more_requests_than_may_be_under_way_are_told_to_come_again(monkeypatch):
    """The first two are answered only when the third has been refused."""
    monkeypatch.setattr(http_server, "MAX_CONNECTIONS", 2)

    async def clients():
        refused = asyncio.Event()

        async def slow(body, client):
            await refused.wait()
            return {}

        app = Guard(make_app("/get", slow, None, 1000), None)
        transport = httpx.ASGITransport(app=app)
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
            first = [asyncio.create_task(client.post("/get", json={})) for _ in range(2)]
            while app.under_way < 2:
                await asyncio.sleep(0)
            third = await client.post("/get", json={})
            refused.set()
            return third, await asyncio.gather(*first)

    third, first = asyncio.run(asyncio.wait_for(clients(), 300))
    assert (third.status_code, third.headers["retry-after"]) == (503, "1")
    assert [each.status_code for each in first] == [200, 200]


def test_a_body_that_says_it_is_too_large_is_refused_before_it_is_sent():
    async def clients(port):
        return await answered(port, HEAD + b"Content-Length: 99999\r\n\r\n")

    assert during(app_of(max_bytes=1000), clients).startswith("HTTP/1.1 413")


BODY = b" " * 20_000_000  # more than the buffers between two processes hold
SIZE = b"Content-Length: %d\r\n" % len(BODY)
CLOSE = b"Connection: close\r\n"
EARLY = {  # requests that are refused when their head has arrived
    "too large": (HEAD + SIZE + b"\r\n" + BODY, "413"),
    "too large, to be closed": (HEAD + CLOSE + SIZE + b"\r\n" + BODY, "413"),
    "too large, of HTTP 1.0": (HEAD.replace(b"1.1", b"1.0") + SIZE + b"\r\n" + BODY, "413"),
    "too large, in one chunk": (
        HEAD + CLOSE + b"Transfer-Encoding: chunked\r\n\r\n%x\r\n%s\r\n0\r\n\r\n" % (len(BODY), BODY),
        "413",
    ),
    "no route": (HEAD.replace(b"/get", b"/other") + CLOSE + SIZE + b"\r\n" + BODY, "404"),
    "foreign host": (HEAD.replace(b"localhost", b"evil.org") + CLOSE + SIZE + b"\r\n" + BODY, "421"),
}


@pytest.mark.notices(
    "a refused request is not read to its end, so its client sees a reset connection",
    "serving/http_server.py",
    'and not message.get("more_body", False) and not self.is_whole:',
    "and message is None:",
)
@pytest.mark.parametrize("case", EARLY)
def test_a_client_that_sends_all_before_it_reads_is_told_why_it_is_refused(case):
    request, status = EARLY[case]

    async def clients(port):
        reader, writer = await sent(port, request)
        answer = await reader.readuntil(b"\r\n\r\n")
        writer.close()
        return answer.split()[1].decode()

    assert during(app_of(max_bytes=1000), clients) == status


@pytest.mark.notices(
    "a large request over a slow line never arrives",
    "serving/http_server.py",
    "self.reading_since + READ_S + self.received / BYTES_PER_S",
    "self.reading_since + READ_S",
)
def test_a_large_request_over_a_slow_line_arrives(monkeypatch, clock):
    monkeypatch.setattr(http_server, "READ_S", 60.0)
    monkeypatch.setattr(http_server, "BYTES_PER_S", 1)

    async def clients(port):
        body = b'{"x": "%s"}' % (b"a" * 500)
        reader, writer = await sent(port, whole(body)[:400])
        await asyncio.sleep(0.05)  # it has arrived
        for _ in range(4):
            clock.forward(61.0)
            await asyncio.sleep(0.01)  # what is due by now happens before
        writer.write(whole(body)[400:])
        line = await reader.readline()
        writer.close()
        return line.decode().strip()

    assert during(app_of(), clients) == "HTTP/1.1 200 OK"


@pytest.mark.notices(
    "an endless body is read without end after its refusal",
    "serving/http_server.py",
    "if self.cycle is None or not self.cycle.response_started:",
    "if data:",
)
def test_an_endless_body_is_not_read_without_end_behind_its_refusal(monkeypatch, clock):
    monkeypatch.setattr(http_server, "READ_S", 60.0)
    monkeypatch.setattr(http_server, "BYTES_PER_S", 1000)

    async def clients(port):
        reader, writer = await sent(port, HEAD + b"Transfer-Encoding: chunked\r\n\r\n7d0\r\n" + b"a" * 2000 + b"\r\n")
        refusal = await reader.readline()
        for _ in range(50):
            with suppress(ConnectionError):
                writer.write(b"%x\r\n%s\r\n" % (10**5, b"a" * 10**5))  # 100 seconds, if it bought any
                await writer.drain()
            clock.forward(20.0)
            await asyncio.sleep(0.01)
            if writer.is_closing():
                return refusal
        pytest.fail("the connection is open still")

    assert during(app_of(max_bytes=1000), clients).startswith(b"HTTP/1.1 413")
