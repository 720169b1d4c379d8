"""An HTTP server with one route: token, size limit, deadlines, a health route, and a graceful end.

A handler gets the JSON object of a request and the address of its client, and returns the JSON object of the answer. It
raises `BadRequest` for a mistake of the caller (HTTP 422). When a client closes its connection, its handler is
cancelled. When the server is stopped, requests under way may finish.

uvicorn waits for the rest of a request without a limit. Here a connection has READ_S seconds to send a whole request,
and a second more for each BYTES_PER_S that have arrived, so that a large request may come over a slow line.
Where MAX_CONNECTIONS are open already, the one that has waited longest to send its request is closed for a new one, so
idle connections cannot lock others out.
"""

from __future__ import annotations

import asyncio
import errno
import hmac
import json
import signal
import socket
import threading
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import AbstractAsyncContextManager, contextmanager
from types import FrameType
from typing import Any, TypeVar

import h11
import uvicorn
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from rlhf_suite.config.declarations.tools import THIS_MACHINE, ServeConfig
from rlhf_suite.errors import UserError
from rlhf_suite.launch.address import join_address
from rlhf_suite.launch.stop import SIGNALS, hear, is_ignored

T = TypeVar("T")

Handler = Callable[[dict[str, Any], str], Awaitable[dict[str, Any]]]
Lifespan = Callable[[FastAPI], AbstractAsyncContextManager[None]]
GRACE_S = 30  # for requests under way when the server is to stop
READ_S = 30.0  # for a connection to send a whole request, headers and body
BYTES_PER_S = 64 << 10  # that a large request must come with
MAX_CONNECTIONS = 512
ABOUT_PORTS = (errno.EADDRINUSE, errno.EACCES)  # errors of which another port is the remedy
ADDRESS_HERE = "Write an address of this machine, such as 127.0.0.1,"
CLIENT_GONE = Response(status_code=499)  # for a client that has closed its connection; it is never sent


class BadRequest(ValueError):
    """The request cannot be understood. The message says why."""


class TooLarge(ValueError):
    """The request has more bytes than the limit. `beginning` are those that have been read."""

    def __init__(self, reason: str, beginning: bytes = b"") -> None:
        super().__init__(reason)
        self.beginning = beginning


def make_app(path: str, handler: Handler, lifespan: Lifespan | None, max_bytes: int) -> FastAPI:
    """Return the app that answers POST `path` by `handler`, and GET /health, which needs no token and tells nothing."""
    app = FastAPI(lifespan=lifespan, openapi_url=None)
    app.add_api_route("/health", lambda: {"status": "ok"}, methods=["GET"])

    async def answer(request: Request) -> Response:
        try:
            given = parse_body(await body_of(request, max_bytes))
            response = await answer_while_connected(
                request, handler(given, request.client.host if request.client else "")
            )
        except ClientDisconnect:
            return CLIENT_GONE
        except TooLarge as error:
            return JSONResponse({"error": str(error)}, 413)
        except BadRequest as error:
            return JSONResponse({"error": str(error)}, 422)
        return CLIENT_GONE if response is None else JSONResponse(response)

    app.add_route(path, answer, methods=["POST"])
    return app


async def body_of(request: Request, max_bytes: int) -> bytes:
    """Return the body of a request; raise TooLarge as soon as it exceeds `max_bytes`."""
    reason = f"the request is larger than {max_bytes} bytes"
    declared = request.headers.get("Content-Length", "0")
    if not declared.isdecimal() or int(declared[:20]) > max_bytes:
        raise TooLarge(reason)
    body = bytearray()
    async for chunk in request.stream():
        body += chunk
        if len(body) > max_bytes:
            raise TooLarge(reason, bytes(body))
    return bytes(body)


def parse_body(body: bytes) -> dict[str, Any]:
    """Return the JSON object in a body; raise BadRequest, which quotes nothing of the body, if there is none."""
    try:
        given = json.loads(body.decode())
    except UnicodeDecodeError as error:
        raise BadRequest(f"the request is not UTF-8 (byte {error.start})") from error
    except json.JSONDecodeError as error:
        raise BadRequest(f"the request is not JSON: {error.msg} (character {error.pos})") from error
    except RecursionError as error:
        raise BadRequest("the request's JSON is nested too deeply") from error
    except ValueError as error:  # Python has a limit for the digits of an integer
        raise BadRequest("the request holds an integer of too many digits") from error
    if not isinstance(given, dict):
        raise BadRequest("expected a JSON object")
    return given


async def answer_while_connected(request: Request, answer: Awaitable[T]) -> T | None:
    """Return the awaited answer. If the client closes its connection first, cancel the work and return None."""
    work = asyncio.ensure_future(answer)
    gone = asyncio.ensure_future(request.receive())  # after the whole body, the next message is a disconnect
    try:
        await asyncio.wait((work, gone), return_when=asyncio.FIRST_COMPLETED)
        return await work if work.done() else None
    finally:
        work.cancel()
        gone.cancel()


class Exchange:
    """The messages of a request and of its response, which ends when the request has been read to its end.

    A response may be given before that, as one that refuses a large request is. Where a connection is then closed, the
    system resets it because of the unread bytes, and a client that is still sending sees the reset in place of the
    response. So the rest is read and dropped, within the time that `Protocol` gives to a request.
    """

    def __init__(self, receive: Receive, send: Send) -> None:
        self.receive_next, self.send_next = receive, send
        self.is_whole = False  # the request has been read to its end, or its client is gone

    async def receive(self) -> Message:
        """Return the next message of the client."""
        message = await self.receive_next()
        self.is_whole = self.is_whole or not message.get("more_body", False)
        return message

    async def send(self, message: Message) -> None:
        """Send a message of the response; all of its bytes go out before the rest of the request is read."""
        if message["type"] == "http.response.body" and not message.get("more_body", False) and not self.is_whole:
            await self.send_next({**message, "more_body": True})
            while not self.is_whole:
                await self.receive()
            message = {"type": "http.response.body", "body": b""}
        await self.send_next(message)


class Guard:
    """Lets requests through that have the token or, if the server has no token, that name this machine as the host.

    The check of the host prevents DNS rebinding: a web page that is open on this machine could otherwise send requests
    here under a name of its own, which its owner's name server resolves to 127.0.0.1. A request that a page of another
    origin makes (a browser says so by the header Origin) is refused, also with a token. /health needs no token. When
    too many requests are under way, further ones get HTTP 503.
    """

    def __init__(self, app: ASGIApp, token: str | None) -> None:
        self.app, self.expected = app, None if token is None else f"Bearer {token}".encode()
        self.under_way = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        exchange, refusal = Exchange(receive, send), self.refusal(scope)
        if refusal is not None:
            await refusal(scope, exchange.receive, exchange.send)
            return
        self.under_way += 1
        try:
            await self.app(scope, exchange.receive, exchange.send)
        finally:
            self.under_way -= 1

    def refusal(self, scope: Scope) -> Response | None:
        """Return the response that refuses a request, or None if the request may pass."""
        if (refused := self.refuse_unauthorised(scope)) is not None:
            return refused
        if self.under_way >= MAX_CONNECTIONS:
            return JSONResponse({"error": "too many requests are in progress"}, 503, {"retry-after": "1"})
        return None

    def refuse_unauthorised(self, scope: Scope) -> Response | None:
        """Return the response to a request without the token, under a strange name, or of a foreign web page."""
        headers = dict(scope["headers"])
        origin = headers.get(b"origin")
        if origin is not None and origin.partition(b"://")[2] != headers.get(b"host", b""):
            return JSONResponse({"error": "requests of web pages of another origin are refused"}, 403)
        if self.expected is None:
            host = headers.get(b"host", b"").decode("latin-1")
            if host_name(host) not in THIS_MACHINE:
                return JSONResponse({"error": "the Host header names another machine; ask for 127.0.0.1"}, 421)
        elif scope["path"] != "/health" and not hmac.compare_digest(token_in(headers), self.expected):
            return JSONResponse({"error": "a bearer token is needed"}, 401)
        return None


def token_in(headers: Mapping[bytes, bytes]) -> bytes:
    """Return the token of a request as a bearer token; clients of Tinker's protocol send it as X-API-Key."""
    key = headers.get(b"x-api-key")
    return headers.get(b"authorization", b"") if key is None else b"Bearer " + key


def host_name(host: str) -> str:
    """Return the name or address in a Host header, without the port."""
    name, colon, port = host.rpartition(":")
    name = name if colon and port.isdecimal() else host
    return name.strip("[]").lower()


def listen(config: ServeConfig) -> socket.socket:
    """Return the socket of a server; UserError where its address cannot be had."""
    try:
        return open_listening_socket(config.host, config.port)
    except OSError as error:
        remedy = "Choose another serve.port, or 0" if error.errno in ABOUT_PORTS else f"{ADDRESS_HERE} in serve.host"
        problem = f"serve.host={config.host} serve.port={config.port}: {describe_refusal(error)}"
        raise UserError(f"{problem}. {remedy}") from None


def address_of(listener: socket.socket) -> str:
    """Return the URL at which a socket listens."""
    host, port = listener.getsockname()[:2]
    return f"http://{join_address(host, port)}"


def open_listening_socket(host: str, port: int) -> socket.socket:
    """Return a socket that listens; port 0 chooses a free port.

    Raises:
        OSError: the address is in use, or not one of this machine. An empty one would be all of them.
    """
    if not host:
        raise OSError(errno.EADDRNOTAVAIL, "the address is empty")
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    return socket.create_server((host, port), family=family, backlog=MAX_CONNECTIONS)


def describe_refusal(error: OSError) -> str:
    """Return why the system refuses an address, without the address, which Python appends."""
    return (error.strerror or str(error)).partition(" (while attempting")[0]


class Protocol(H11Protocol):
    """A connection that is closed unless its request arrives in time.

    `reading_since` is the time since which a request is awaited; it is None while a request is being answered.
    `received` counts the bytes since then.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.deadline: asyncio.TimerHandle | None = None
        self.reading_since: float | None = None
        self.received = 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)  # type: ignore[arg-type]
        if len(self.connections) > MAX_CONNECTIONS:
            self.make_room()
        self.watch()

    def make_room(self) -> None:
        """Close the connection that has waited longest to send its request, or this one if none is waiting."""
        waiting = [
            connection
            for connection in self.connections
            if isinstance(connection, Protocol) and connection.reading_since is not None
        ]
        min(waiting, key=lambda connection: connection.reading_since or 0.0, default=self).end()

    def data_received(self, data: bytes) -> None:
        if self.cycle is None or not self.cycle.response_started:  # what is sent after a refusal buys no time
            self.received += len(data)
        super().data_received(data)
        self.watch()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self.watch()

    def connection_lost(self, exc: Exception | None) -> None:
        self.stop_watch()
        super().connection_lost(exc)

    def watch(self) -> None:
        """Start the timer while a request is incomplete; stop it once the request is complete."""
        is_whole = self.conn.their_state not in (h11.IDLE, h11.SEND_BODY)
        if is_whole or self.transport.is_closing():
            self.stop_watch()
        elif self.deadline is None:
            self.reading_since, self.received = self.loop.time(), 0
            self.deadline = self.loop.call_later(READ_S, self.end_if_late)

    def end_if_late(self) -> None:
        """Close the connection, unless so much has arrived that the rest may take longer."""
        assert self.reading_since is not None
        due = self.reading_since + READ_S + self.received / BYTES_PER_S
        if due > self.loop.time():
            self.deadline = self.loop.call_at(due, self.end_if_late)
        else:
            self.end()

    def stop_watch(self) -> None:
        """Stop the timer."""
        if self.deadline is not None:
            self.deadline.cancel()
        self.deadline = self.reading_since = None

    def end(self) -> None:
        """Close the connection at once, without sending what is left."""
        self.stop_watch()
        self.connections.discard(self)
        self.transport.abort()


class Server(uvicorn.Server):
    """A server that ends normally on each signal that asks to stop. Uvicorn knows two, and would raise them again."""

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """End when requests under way are answered. A second signal ends the process at once."""
        super().handle_exit(sig, frame)
        hear(sig)

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        if threading.current_thread() is not threading.main_thread():
            yield  # signals are those of the main thread
            return
        stops = [number for number in (signal.SIGINT, *SIGNALS) if not is_ignored(number)]
        before = {number: signal.signal(number, self.handle_exit) for number in stops}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


def server_of(app: ASGIApp) -> Server:
    """Return the server of an app, with the deadlines of `Protocol`."""
    config = uvicorn.Config(
        app,
        http=Protocol,
        ws="none",
        log_level="warning",
        access_log=False,
        timeout_graceful_shutdown=GRACE_S,
        server_header=False,
    )
    return Server(config)


def serve(app: ASGIApp, listener: socket.socket) -> None:
    """Answer requests until a signal asks to stop."""
    server_of(app).run(sockets=[listener])
