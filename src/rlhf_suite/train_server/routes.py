"""The routes of the server: bodies are JSON or messages of the protocol, and so are answers; an error has a reason."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response
from starlette.requests import ClientDisconnect

from rlhf_suite.errors import UserError
from rlhf_suite.serving.http_server import (
    CLIENT_GONE,
    BadRequest,
    Lifespan,
    TooLarge,
    answer_while_connected,
    body_of,
    parse_body,
)
from rlhf_suite.train_server.jobs import Answer
from rlhf_suite.train_server.service import PENDING, NotFound, Service

API = "/api/v1"
VERSION = "0.38"  # of the client package whose protocol this is
MESSAGE = "application/x-protobuf"
BEGINNING = 1000  # bytes of a message, in which its model and its number are


Call = Callable[[Request, bytes], Awaitable[Answer]]  # of a request and its body


def make_app(service: Service, lifespan: Lifespan, max_bytes: int) -> FastAPI:
    """Return the app that answers the calls of a service; GET /health needs no token and tells nothing."""
    app = FastAPI(lifespan=lifespan, openapi_url=None)
    app.add_api_route("/health", lambda: {"status": "ok"}, methods=["GET"])

    async def forward_backward(request: Request, body: bytes) -> Answer:
        check_message(request)
        return await service.forward_backward(body)

    async def capabilities(request: Request, body: bytes) -> Answer:
        return await service.capabilities()

    async def sampler(request: Request, body: bytes) -> Answer:
        return await service.sampler(request.path_params["sampler"])

    async def health(request: Request, body: bytes) -> Answer:
        return {"status": "ok"}

    calls: dict[str, Call] = {path: with_json(call) for path, call in service.calls().items()}
    calls |= {"forward_backward": forward_backward, "sessions/{session}/finish": health}
    for path, call in calls.items():
        refuse = service.refuse if call is forward_backward else None
        app.add_route(f"{API}/{path}", make_route(call, max_bytes, refuse), methods=["POST"])
    looks: dict[str, Call] = {"healthz": health, "get_server_capabilities": capabilities, "samplers/{sampler}": sampler}
    for path, call in looks.items():
        app.add_route(f"{API}/{path}", make_route(call, max_bytes), methods=["GET"])
    app.add_route(API + "/{rest:path}", make_route(unknown, max_bytes), methods=["GET", "POST", "PUT", "DELETE"])
    return app


def check_message(request: Request) -> None:
    """Refuse a request whose body is not a message of the protocol as it is."""
    if request.headers.get("content-encoding", "identity") != "identity":
        raise BadRequest("the request is compressed, which this server has not asked for. Send it as it is")
    if request.headers.get("content-type", "").startswith("application/json"):
        raise BadRequest(f"the request is JSON, as clients before tinker {VERSION} send it. Install tinker {VERSION}")


async def unknown(request: Request, body: bytes) -> Answer:
    """Refuse a request whose path no call has."""
    path = request.url.path.removeprefix(f"{API}/")
    raise NotFound(f"this server has no call {request.method} {path:.100}. It has those of tinker {VERSION}")


def with_json(call: Callable[[dict[str, Any]], Awaitable[Answer]]) -> Call:
    """Return a call that takes the JSON object in the body of a request."""

    async def answer(request: Request, body: bytes) -> Answer:
        return await call(parse_body(body))

    return answer


def make_route(
    call: Call, max_bytes: int, refuse: Callable[[bytes, str], None] | None = None
) -> Callable[[Request], Awaitable[Response]]:
    """Return a route that reads the whole request first, and whose errors are answers. `refuse` is told how a request
    begins that is too large, and why it is refused."""

    async def respond(request: Request) -> Response:
        try:
            body = await body_of(request, max_bytes)
            result = await answer_while_connected(request, call(request, body))
        except ClientDisconnect:
            result = None
        except TooLarge as error:
            reason = f"{error} (serve.max_request_mb). Send less in a request"
            if refuse is not None:
                refuse(error.beginning or await beginning_of(request), reason)
            return JSONResponse({"detail": reason}, 413)
        except (BadRequest, UserError, NotFound) as error:
            return JSONResponse({"detail": str(error)}, 404 if isinstance(error, NotFound) else 422)
        return CLIENT_GONE if result is None else response_of(result)

    return respond


async def beginning_of(request: Request) -> bytes:
    """Return at least the first bytes of a body of which nothing has been read; none where the client waits for a word
    of the server, or goes away."""
    beginning = b""
    if "expect" not in request.headers:
        with suppress(ClientDisconnect):
            async for piece in request.stream():
                beginning += piece
                if len(beginning) >= BEGINNING:
                    break
    return beginning


def response_of(answer: Answer) -> Response:
    """Return an answer as a response; 408 asks the client to ask again."""
    if isinstance(answer, bytes):
        return Response(answer, media_type=MESSAGE)
    return JSONResponse(answer, 408 if answer.get("type") == PENDING["type"] else 200)
