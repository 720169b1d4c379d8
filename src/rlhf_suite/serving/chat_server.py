"""The endpoint of agents over HTTP: a URL and a key for each episode (docs/agents_program.md).

    POST /sessions/{id}/v1/chat/completions    a turn of the model, also as a stream
    POST /sessions/{id}/v1/messages            the same as Messages of Anthropic
    POST /sessions/{id}/v1/messages/count_tokens
    POST /sessions/{id}/v1/responses           the same as Responses of OpenAI
    GET  /sessions/{id}/v1/models              the name of the model
    POST /sessions/{id}/complete               {reward, score, metrics, error}: the result of the episode
    GET  /health

The server has a thread and an event loop of its own. What touches a session runs on the event loop of the engines.
"""

from __future__ import annotations

import asyncio
import hmac
import threading
from collections.abc import Awaitable, Callable, Coroutine
from pathlib import Path
from typing import Any, TypeVar

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response, StreamingResponse
from starlette.requests import ClientDisconnect
from starlette.types import Scope

from rlhf_suite.agents.chat import CHAT
from rlhf_suite.agents.endpoint import ChatSession
from rlhf_suite.agents.messages import MESSAGES
from rlhf_suite.agents.request import MODEL, Api, ChatRequest, Refused, Wishes
from rlhf_suite.agents.responses import RESPONSES
from rlhf_suite.errors import UserError
from rlhf_suite.launch.address import join_address
from rlhf_suite.serving.http_server import (
    ADDRESS_HERE,
    CLIENT_GONE,
    BadRequest,
    Guard,
    TooLarge,
    answer_while_connected,
    body_of,
    describe_refusal,
    open_listening_socket,
    parse_body,
    server_of,
)
from rlhf_suite.tracking.console import show_line

T = TypeVar("T")

MAX_BYTES = 16 << 20  # of a request
PROGRAMS = "programs"  # folder among the logs of a run, for what the commands of episodes print
RETRIES = "x-stainless-retry-count"  # how often clients of OpenAI and Anthropic have sent a request before
APIS = {"chat/completions": CHAT, "messages": MESSAGES, "responses": RESPONSES}  # by the end of the path
OVERRIDDEN: set[str] = set()  # fields whose wishes this process has logged
Handler = Callable[[Request, ChatSession], Awaitable[Response]]


class ChatServer:
    """Serves the sessions that are open. It begins to listen at the first one, on a free port of `host`. Commands that
    use them keep what they print in the folder `logs`."""

    def __init__(self, host: str, logs: Path | None = None) -> None:
        self.host, self.logs, self.address = host, logs, ""
        self.sessions: dict[str, ChatSession] = {}

    def open(self, chat: ChatSession) -> str:
        """Return the base URL of a session.

        Raises:
            UserError: this machine does not have the address `host`.
        """
        if not self.address:
            self.start()
        self.sessions[chat.id] = chat
        return f"{self.address}/sessions/{chat.id}/v1"

    def close(self, chat: ChatSession) -> None:
        """Answer no further request of a session."""
        self.sessions.pop(chat.id, None)

    def start(self) -> None:
        """Listen, in a thread that ends with the process."""
        try:
            listener = open_listening_socket(self.host, 0)
        except OSError as error:
            problem = f"agent.host={self.host}: {describe_refusal(error)}"
            raise UserError(f"{problem}. {ADDRESS_HERE} in agent.host") from error
        server = server_of(SessionGuard(self.app(), None))
        threading.Thread(target=server.run, args=([listener],), name="agent endpoint", daemon=True).start()
        self.address = f"http://{join_address(self.host, listener.getsockname()[1])}"

    def app(self) -> FastAPI:
        """Return the routes."""
        app = FastAPI(openapi_url=None)
        app.add_api_route("/health", lambda: {"status": "ok"}, methods=["GET"])
        session = "/sessions/{id}"
        for path, api in APIS.items():
            app.add_route(f"{session}/v1/{path}", self.of_session(write_turn(api), api), methods=["POST"])
        app.add_route(f"{session}/v1/messages/count_tokens", self.of_session(count_tokens, MESSAGES), methods=["POST"])
        app.add_route(f"{session}/v1/models", self.of_session(models), methods=["GET"])
        app.add_route(f"{session}/complete", self.of_session(complete), methods=["POST"])
        return app

    def of_session(self, handler: Handler, api: Api = CHAT) -> Callable[[Request], Awaitable[Response]]:
        """Return a route that answers by `handler`, for those who have the key of the session. Errors have the form of
        `api`."""

        async def answer(request: Request) -> Response:
            chat = None
            try:
                chat = self.let_in(request)
                return await handler(request, chat)
            except ClientDisconnect:
                return CLIENT_GONE
            except Refused as error:
                refused = error
            except TooLarge as error:
                refused = Refused(str(error), 413)
            except BadRequest as error:
                refused = Refused(str(error))
            if chat is not None:
                chat.refused = refused.message
            return JSONResponse(api.refuse(refused), refused.status)

        return answer

    def let_in(self, request: Request) -> ChatSession:
        """Return the session of a request that has its key."""
        chat = self.sessions.get(request.path_params["id"])
        if chat is None:
            raise Refused("there is no such session, or its episode is over", 404, "no_session")
        given = request.headers.get("x-api-key") or request.headers.get("authorization", "").removeprefix("Bearer ")
        if not hmac.compare_digest(given.encode(), chat.key.encode()):
            raise Refused("the key of this session is needed as a bearer token", 401, "wrong_key")
        return chat


class SessionGuard(Guard):
    """Bounds the requests that are under way. Each session has a key of its own, so no other check is needed here."""

    def refuse_unauthorised(self, scope: Scope) -> Response | None:
        return None


def write_turn(api: Api) -> Handler:
    """Return what answers requests of an API with a turn of the model."""

    async def write(request: Request, chat: ChatSession) -> Response:
        """Let the model write a turn, to its end also if the client goes away: it may ask again."""
        given = await read_request(request, chat, api)
        retries = request.headers.get(RETRIES, "0")
        is_retry = retries.isdecimal() and int(retries[:9]) > 0
        completion = await answer_while_connected(request, on_its_loop(chat, chat.answer(given, is_retry)))
        if completion is None:
            return CLIENT_GONE
        tokenizer = chat.session.bridge.tokenizer
        if given.streams:
            return StreamingResponse(api.stream(completion, given, tokenizer), media_type="text/event-stream")
        return JSONResponse(api.answer(completion, given, tokenizer))

    return write


async def read_request(request: Request, chat: ChatSession, api: Api) -> ChatRequest:
    """Return a request of an API. What it asks of the sampling, which has no effect, is logged once."""
    body = parse_body(await body_of(request, MAX_BYTES))
    given = api.read(body, Wishes(chat.session.sampling, chat.overrides))
    for wish in given.overridden:
        name = wish.partition("=")[0].partition("[")[0]
        if name not in OVERRIDDEN:
            OVERRIDDEN.add(name)
            show_line(
                f"A client of the endpoint asks for {wish}, which has no effect: the run samples as rollout.* says "
                "(agent.sampling=override). Later requests with it are not logged.",
                to_stderr=True,
            )
    return given


async def count_tokens(request: Request, chat: ChatSession) -> Response:
    """Answer with the number of tokens of the prompt that a request would have."""
    given = await read_request(request, chat, MESSAGES)

    async def count() -> int:
        return chat.count_tokens(given)

    return JSONResponse({"input_tokens": await on_its_loop(chat, count())})


async def models(request: Request, chat: ChatSession) -> Response:
    """Answer with the one model there is."""
    model = {"id": MODEL, "object": "model", "owned_by": "rlhf_suite", "created": 0}
    of_anthropic = {"type": "model", "display_name": MODEL, "created_at": "1970-01-01T00:00:00Z"}
    pages = {"has_more": False, "first_id": MODEL, "last_id": MODEL}
    return JSONResponse({"object": "list", "data": [model | of_anthropic], **pages})


async def complete(request: Request, chat: ChatSession) -> Response:
    """Take the result of an episode."""
    result = parse_body(await body_of(request, MAX_BYTES))

    async def take() -> None:
        chat.complete(result)

    await on_its_loop(chat, take())
    return JSONResponse({"status": "ok"})


def on_its_loop(chat: ChatSession, work: Coroutine[Any, Any, T]) -> Awaitable[T]:
    """Return the result of a coroutine that runs on the event loop of a session."""
    return asyncio.wrap_future(asyncio.run_coroutine_threadsafe(work, chat.loop))
