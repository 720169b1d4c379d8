"""Python at a server in the protocol of SandboxFusion, in place of the jail of this machine.

A call is POST <url>/run_code {"code", "language": "python", "run_timeout", "memory_limit_MB"}, and the answer
{"status": "Success" | "Failed" | "SandboxError", "message", "run_result": {"status": "Finished" | "Error" |
"TimeLimitExceeded", "stdout", "stderr", "return_code"}}. Each call is a program of its own: names do not last.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import httpx

from rlhf_suite.foreign_text import printable
from rlhf_suite.rewards.http_body import certificates
from rlhf_suite.rewards.retry import wait_s
from rlhf_suite.sandbox.session import CallResult

TRIES = 4  # of a call, where the server does not answer or is busy
BUSY = frozenset({408, 425, 429, 500, 502, 503, 504})
MARGIN_S = 30.0  # beyond the time of the code, for a queue and the start of a sandbox
LIMIT = 1 << 16  # characters of an output


class ServerError(Exception):
    """The server did not run the code. `retry_after` is the header with which it says when to ask again."""

    def __init__(self, reason: str, retry_after: str | None = None) -> None:
        super().__init__(reason)
        self.retry_after = retry_after


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
        async with httpx.AsyncClient(timeout=timeout_s + MARGIN_S, verify=certificates()) as client:
            for attempt in range(1, TRIES + 1):
                try:
                    return await self.tried(client, body | {"memory_limit_MB": self.memory_mb})
                except ServerError as error:
                    if attempt == TRIES:
                        raise ServerError(f"{self.url}: {printable(str(error))}, {TRIES} times in a row") from error
                    await asyncio.sleep(wait_s(attempt, error.retry_after))
        raise AssertionError("the last try returns or raises")

    async def tried(self, client: httpx.AsyncClient, body: dict[str, Any]) -> CallResult:
        """Return the result of one request."""
        try:
            response = await client.post(self.url, json=body)
        except httpx.TransportError as error:
            raise ServerError(str(error) or type(error).__name__) from error
        retry_after = response.headers.get("Retry-After")
        if response.status_code in BUSY:
            raise ServerError(f"HTTP {response.status_code}", retry_after)
        response.raise_for_status()
        answer = response.json()
        ran = answer.get("run_result")
        if answer.get("status") == "SandboxError" or ran is None:
            raise ServerError(str(answer.get("message") or answer.get("status")), retry_after)
        output = shown(ran.get("stdout"))
        if ran.get("status") == "TimeLimitExceeded":
            return CallResult(output, problem=f"it was killed after {body['run_timeout']:g} s", timed_out=True)
        failed = answer.get("status") != "Success"
        problem = shown(ran.get("stderr")) or f"exit code {ran.get('return_code')}"
        return CallResult(output, problem=problem if failed else None)

    def close(self) -> None:
        """Do nothing: the server keeps nothing of an episode."""


def shown(text: str | None) -> str:
    return printable(text or "", LIMIT, keep_lines=True)


def remote(url: str, memory_mb: int) -> Callable[[], RemotePython]:
    """Return what makes the interpreter of an episode."""
    return lambda: RemotePython(url, memory_mb)
