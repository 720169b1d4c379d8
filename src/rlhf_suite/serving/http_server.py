"""An HTTP server of one route: token, size limit, health, and an end that lets requests under way finish.

A handler gets the request's JSON object and returns the answer's; `BadRequest` is the caller's mistake (HTTP 422). The
handler of a client that hangs up is cancelled. Connections that do not send a whole request in time are closed
(`serving/http_protocol.py`).
"""

from __future__ import annotations

import asyncio
import hmac
import json
import signal
import socket
from collections.abc import Awaitable, Callable, Iterator
from contextlib import AbstractAsyncContextManager, contextmanager
from typing import Any

import uvicorn
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Receive, Scope, Send

from rlhf_suite.serving.http_protocol import MAX_CONNECTIONS, Protocol

Handler = Callable[[dict[str, Any]], Awaitable[dict[str, Any]]]
Lifespan = Callable[[FastAPI], AbstractAsyncContextManager[None]]
LOOPBACK = ("127.0.0.1", "localhost", "::1")
GRACE_S = 30  # for requests under way when the server is to stop
NOBODY = Response(status_code=499)  # the answer to a client that is not there any more; it is never sent


class BadRequest(ValueError):
    """What was asked makes no sense: the message says why."""


class TooLarge(ValueError):
    """The request has more bytes than allowed."""


def make_app(path: str, handler: Handler, health: dict[str, str], lifespan: Lifespan | None, max_bytes: int) -> FastAPI:
    """POST `path` and GET /health."""
    app = FastAPI(lifespan=lifespan, openapi_url=None)
    app.add_api_route("/health", lambda: health, methods=["GET"])

    async def answer(request: Request) -> Response:
        try:
            given = parsed(await body_of(request, max_bytes))
            found = await while_connected(request, handler(given))
        except ClientDisconnect:
            return NOBODY
        except TooLarge as error:
            return JSONResponse({"error": str(error)}, 413, {"connection": "close"})
        except BadRequest as error:
            return JSONResponse({"error": str(error)}, 422)
        return NOBODY if found is None else JSONResponse(found)

    app.add_route(path, answer, methods=["POST"])
    return app


async def body_of(request: Request, max_bytes: int) -> bytes:
    """Read the body of a request; TooLarge as soon as it is known to be."""
    reason = f"the request is larger than {max_bytes} bytes"
    declared = request.headers.get("Content-Length", "0")
    if not declared.isdecimal() or int(declared[:20]) > max_bytes:
        raise TooLarge(reason)
    body = bytearray()
    async for chunk in request.stream():
        body += chunk
        if len(body) > max_bytes:
            raise TooLarge(reason)
    return bytes(body)


def parsed(body: bytes) -> dict[str, Any]:
    """The JSON object of a body. Whatever is wrong with it is a BadRequest that repeats nothing of it."""
    try:
        given = json.loads(body.decode())
    except UnicodeDecodeError as error:
        raise BadRequest(f"the request is not UTF-8 (byte {error.start})") from error
    except json.JSONDecodeError as error:
        raise BadRequest(f"the request is not JSON: {error.msg} (character {error.pos})") from error
    except RecursionError as error:
        raise BadRequest("the request's JSON is nested too deeply") from error
    except ValueError as error:  # Python's own limit
        raise BadRequest("the request holds an integer of too many digits") from error
    if not isinstance(given, dict):
        raise BadRequest("expected a JSON object")
    return given


async def while_connected(request: Request, answer: Awaitable[dict[str, Any]]) -> dict[str, Any] | None:
    """Await an answer, or None when the client hangs up first: the work on it is cancelled."""
    work = asyncio.ensure_future(answer)
    gone = asyncio.ensure_future(request.receive())  # after the whole body, the next message is a disconnect
    try:
        await asyncio.wait((work, gone), return_when=asyncio.FIRST_COMPLETED)
        return await work if work.done() else None
    finally:
        work.cancel()
        gone.cancel()


class Guard:
    """Lets a request through that has the token, or, where there is none, that names this machine as its host.

    Without the second a page in a browser here could ask this server under a name of its own, which its owner's name
    server resolves to 127.0.0.1 (DNS rebinding). /health needs no token. With too many requests under way a further
    one is told to come back.
    """

    def __init__(self, app: ASGIApp, token: str | None) -> None:
        self.app, self.expected = app, None if token is None else f"Bearer {token}".encode()
        self.under_way = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        refusal = self.refusal(scope)
        if refusal is not None:
            await refusal(scope, receive, send)
            return
        self.under_way += 1
        try:
            await self.app(scope, receive, send)
        finally:
            self.under_way -= 1

    def refusal(self, scope: Scope) -> Response | None:
        """The answer to a request that is not let through."""
        headers = dict(scope["headers"])
        if self.expected is None:
            host = headers.get(b"host", b"").decode("latin-1")
            if host_name(host) not in LOOPBACK:
                return JSONResponse({"error": "the Host header names another machine; ask for 127.0.0.1"}, 421)
        elif scope["path"] != "/health" and not hmac.compare_digest(headers.get(b"authorization", b""), self.expected):
            return JSONResponse({"error": "a bearer token is needed"}, 401)
        if self.under_way >= MAX_CONNECTIONS:
            return JSONResponse({"error": "too many requests are under way"}, 503, {"retry-after": "1"})
        return None


def host_name(host: str) -> str:
    """The name or address of a Host header, without its port."""
    name, colon, port = host.rpartition(":")
    name = name if colon and port.isdecimal() else host
    return name.strip("[]").lower()


def listening(host: str, port: int) -> socket.socket:
    """A socket that listens; OSError when the address is taken. Port 0 takes a free one."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    return socket.create_server((host, port), family=family, backlog=MAX_CONNECTIONS)


class Server(uvicorn.Server):
    """Ends on SIGINT and SIGTERM as something done, not as something killed: uvicorn would raise the signal again."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        before = {each: signal.signal(each, self.handle_exit) for each in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for each, handler in before.items():
                signal.signal(each, handler)


def server_of(app: ASGIApp) -> Server:
    """The server of an app, with the deadlines of `Protocol`."""
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
    """Answer until a signal says to stop."""
    server_of(app).run(sockets=[listener])
