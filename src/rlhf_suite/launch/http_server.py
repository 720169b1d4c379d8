"""An HTTP server of one route: token, size limit, health, and an end that lets requests under way finish.

A handler gets the request's JSON object and returns the answer's; `BadRequest` is the caller's mistake (HTTP 422).
"""

from __future__ import annotations

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

Handler = Callable[[dict[str, Any]], Awaitable[dict[str, Any]]]
Lifespan = Callable[[FastAPI], AbstractAsyncContextManager[None]]
LOOPBACK = ("127.0.0.1", "localhost", "::1")
GRACE_S = 30  # for requests under way when the server is to stop
WAITING = 512  # connections; more are told to come back


class BadRequest(ValueError):
    """What was asked makes no sense: the message says why."""


def make_app(path: str, handler: Handler, health: dict[str, str], lifespan: Lifespan, max_bytes: int) -> FastAPI:
    """POST `path` and GET /health."""
    app = FastAPI(lifespan=lifespan, openapi_url=None)
    app.add_api_route("/health", lambda: health, methods=["GET"])

    async def answer(request: Request) -> Response:
        body = bytearray()
        async for chunk in request.stream():
            body += chunk
            if len(body) > max_bytes:
                return JSONResponse({"error": f"the request is larger than {max_bytes} bytes"}, 413)
        try:
            given = json.loads(body)
            if not isinstance(given, dict):
                raise BadRequest("expected a JSON object")
            return JSONResponse(await handler(given))
        except (BadRequest, json.JSONDecodeError) as error:
            return JSONResponse({"error": str(error)}, 422)

    app.add_route(path, answer, methods=["POST"])
    return app


def with_token(app: FastAPI, token: str | None) -> None:
    """Let only requests with this bearer token through; /health is open."""
    if token is None:
        return
    expected = f"Bearer {token}".encode()

    @app.middleware("http")
    async def check(request: Request, proceed: Callable[[Request], Awaitable[Response]]) -> Response:
        given = request.headers.get("Authorization", "").encode()
        if request.url.path != "/health" and not hmac.compare_digest(given, expected):
            return JSONResponse({"error": "a bearer token is needed"}, 401)
        return await proceed(request)


def listening(host: str, port: int) -> socket.socket:
    """A socket that listens; OSError when the address is taken. Port 0 takes a free one."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    return socket.create_server((host, port), family=family, backlog=WAITING)


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


def serve(app: FastAPI, listener: socket.socket) -> None:
    """Answer until a signal says to stop."""
    config = uvicorn.Config(
        app, log_level="warning", access_log=False, timeout_graceful_shutdown=GRACE_S, limit_concurrency=WAITING
    )
    Server(config).run(sockets=[listener])
