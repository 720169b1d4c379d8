"""Python at a server in the protocol of SandboxFusion, in place of the jail of this machine.

A call is POST <url>/run_code {"code", "language": "python", "run_timeout", "memory_limit_MB"}, and the answer
{"status": "Success" | "Failed" | "SandboxError", "message", "run_result": {"status": "Finished" | "Error" |
"TimeLimitExceeded", "stdout", "stderr", "return_code"}}. Each call is a program of its own: names do not last.

The server is trusted no further than a reward server (`rewards/remote.py`): its answer has a largest size, also
decompressed, a deadline as a whole, and the form above. A call that fails for a reason that may pass is tried
again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import httpx

from rlhf_suite.certificates import certificate_problem
from rlhf_suite.foreign_text import printable
from rlhf_suite.rewards.http_body import (
    BodyError,
    open_client,
    parse_json,
    read_body,
)
from rlhf_suite.rewards.retry import wait_s
from rlhf_suite.sandbox.session import CallResult

TRIES = 4  # of a call, where the server does not answer or is busy
BUSY = frozenset({408, 425, 429, 500, 502, 503, 504})
MARGIN_S = 30.0  # beyond the time of the code, for a queue and the start of a sandbox
LIMIT = 1 << 16  # characters of an output
MAX_BODY_BYTES = 4 << 20  # of an answer
CODE_LENGTH = 20  # characters of an exit code in a message
TOO_LARGE = f"it printed too much: the answer of the server has more than {MAX_BODY_BYTES >> 20} MiB"


class ServerError(Exception):
    """The server did not run the code. `is_passing`: another try may succeed; `retry_after` is the header with which
    the server says when.
    """

    def __init__(self, reason: str, is_passing: bool = True, retry_after: str | None = None) -> None:
        super().__init__(printable(reason))
        self.is_passing, self.retry_after = is_passing, retry_after


class RemotePython:
    """Runs code at the server `url`."""

    def __init__(self, url: str, memory_mb: int) -> None:
        self.url, self.memory_mb = f"{url.rstrip('/')}/run_code", memory_mb

    async def run_async(self, code: str, timeout_s: float) -> CallResult:
        """Run a program within so many seconds. Try again where the server is at fault.

        Raises:
            ServerError: the server did not run it.
        """
        body = {"code": code, "language": "python", "compile_timeout": timeout_s, "run_timeout": timeout_s}
        async with open_client(timeout_s + MARGIN_S) as client:
            for attempt in range(1, TRIES + 1):
                try:
                    return await self.try_once(client, body | {"memory_limit_MB": self.memory_mb})
                except ServerError as error:
                    if not error.is_passing:
                        raise ServerError(f"{self.url}: {error}") from error
                    if attempt == TRIES:
                        raise ServerError(f"{self.url}: {error}, {TRIES} times in a row") from error
                    await asyncio.sleep(wait_s(attempt, error.retry_after))
        raise AssertionError("the last try returns or raises")

    async def try_once(self, client: httpx.AsyncClient, body: dict[str, Any]) -> CallResult:
        """Return the result of one request."""
        try:
            # a deadline for the whole: httpx's own limits each piece of an answer
            async with asyncio.timeout(client.timeout.read), client.stream("POST", self.url, json=body) as response:
                content = await read_body(response, MAX_BODY_BYTES + 1, whole=False)
        except TimeoutError:
            raise ServerError(f"no answer within {client.timeout.read:g} s") from None
        except BodyError as error:
            raise ServerError(str(error), is_passing=False) from None
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            if problem := certificate_problem(error):
                raise ServerError(problem, is_passing=False) from error
            raise ServerError(str(error) or type(error).__name__) from error
        retry_after = response.headers.get("Retry-After")
        if response.status_code != httpx.codes.OK:
            raise ServerError(f"HTTP {response.status_code}", response.status_code in BUSY, retry_after)
        if len(content) > MAX_BODY_BYTES:
            return CallResult("", problem=TOO_LARGE)
        try:
            return result_of(parse_json(content), body["run_timeout"], retry_after)
        except BodyError as error:
            raise ServerError(str(error), is_passing=False) from None

    def close(self) -> None:
        """Do nothing: the server keeps nothing of an episode."""


def result_of(answer: Any, timeout_s: float, retry_after: str | None) -> CallResult:
    """Return the result in an answer of the server.

    Raises:
        ServerError: the server says that it did not run the code.
        BodyError: the answer does not have the form of the protocol.
    """
    if not isinstance(answer, dict):
        raise BodyError(f"the answer is of type {type(answer).__name__}; the protocol has an object")
    ran = answer.get("run_result")
    if answer.get("status") == "SandboxError" or ran is None:
        raise ServerError(read_text(answer, "message") or read_text(answer, "status"), retry_after=retry_after)
    if not isinstance(ran, dict):
        raise BodyError(f"run_result is of type {type(ran).__name__}; the protocol has an object")
    output = read_text(ran, "stdout")
    if ran.get("status") == "TimeLimitExceeded":
        return CallResult(output, problem=f"it was killed after {timeout_s:g} s", timed_out=True)
    failed = answer.get("status") != "Success"
    problem = read_text(ran, "stderr") or f"exit code {printable(str(ran.get('return_code')), CODE_LENGTH)}"
    return CallResult(output, problem=problem if failed else None)


def read_text(answer: dict[str, Any], name: str) -> str:
    """Return a text of an answer without control characters; raise BodyError if it is none."""
    text = answer.get(name) or ""
    if not isinstance(text, str):
        raise BodyError(f"{name} is of type {type(text).__name__}; the protocol has a text")
    return printable(text, LIMIT, keep_lines=True)


def remote(url: str, memory_mb: int) -> Callable[[], RemotePython]:
    """Return what makes the interpreter of an episode."""
    return lambda: RemotePython(url, memory_mb)
