"""The routes of the server: bodies are JSON or messages of the protocol, and so are answers; an error has a reason."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

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
MESSAGE = "application/x-protobuf"


def make_app(service: Service, lifespan: Lifespan, max_bytes: int) -> FastAPI:
    """Return the app that answers the calls of a service; GET /health needs no token and tells nothing."""
    app = FastAPI(lifespan=lifespan, openapi_url=None)
    app.add_api_route("/health", lambda: {"status": "ok"}, methods=["GET"])

    def add(path: str, answer: Callable[[Request], Awaitable[Answer]], method: str = "POST") -> None:
        app.add_route(f"{API}/{path}", guarded(answer), methods=[method])

    async def forward_backward(request: Request) -> Answer:
        if request.headers.get("content-encoding", "identity") != "identity":
            raise BadRequest("the request is compressed, which this server has not asked for. Send it as it is")
        return await service.forward_backward(await body_of(request, max_bytes))

    async def healthz(request: Request) -> Answer:
        return {"status": "ok"}

    async def finish(request: Request) -> Answer:
        return {}

    for path, call in service.calls().items():
        add(path, with_body(call, max_bytes))
    add("forward_backward", forward_backward)
    add("healthz", healthz, "GET")
    add("get_server_capabilities", lambda request: service.capabilities(), "GET")
    add("samplers/{sampler}", lambda request: service.sampler(request.path_params["sampler"]), "GET")
    add("sessions/{session}/finish", finish)
    return app


def with_body(
    call: Callable[[dict[str, object]], Awaitable[Answer]], max_bytes: int
) -> Callable[[Request], Awaitable[Answer]]:
    """Return a call that takes the JSON object in the body of a request."""

    async def answer(request: Request) -> Answer:
        return await call(parse_body(await body_of(request, max_bytes)))

    return answer


def guarded(answer: Callable[[Request], Awaitable[Answer]]) -> Callable[[Request], Awaitable[Response]]:
    """Return a route whose errors are answers."""

    async def respond(request: Request) -> Response:
        try:
            result = await answer_while_connected(request, answer(request))
        except ClientDisconnect:
            result = None
        except TooLarge as error:
            return JSONResponse({"detail": str(error)}, 413, {"connection": "close"})
        except (BadRequest, UserError, NotFound) as error:
            return JSONResponse({"detail": str(error)}, 404 if isinstance(error, NotFound) else 422)
        return CLIENT_GONE if result is None else response_of(result)

    return respond


def response_of(answer: Answer) -> Response:
    """Return an answer as a response; 408 asks the client to ask again."""
    if isinstance(answer, bytes):
        return Response(answer, media_type=MESSAGE)
    return JSONResponse(answer, 408 if answer.get("type") == PENDING["type"] else 200)
