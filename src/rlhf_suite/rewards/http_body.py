"""What clients of HTTP servers share: how they are opened, and the body of a reply, read without trusting the server.

A body may be endless, a gzip bomb, nested a thousand levels deep, or hold an integer of a million digits. Each of these
raises a `BodyError`, which fails the rows of that request and nothing else.
"""

from __future__ import annotations

import json
import os
import zlib
from typing import Any

import httpx

from rlhf_suite.certificates import certificates
from rlhf_suite.errors import UserError

# A reply holds a few numbers per response, so no honest reply comes near this size.
BASE_BYTES, BYTES_PER_ROW = 1 << 20, 64 << 10
MAX_DIGITS = 320  # the largest float has 309
ENCODINGS = "gzip, deflate"
# For the `mounts` of a client: no proxy of the environment stands on the way to this machine.
NO_PROXY_TO_OURSELVES = {f"all://{host}": None for host in ("localhost", "127.0.0.1", "[::1]")}
GZIP_OR_ZLIB = zlib.MAX_WBITS | 32


class BodyError(ValueError):
    """The body cannot be used, and a second request would not help."""


def open_client(timeout_s: float, variable: str = "", max_connections: int = 100) -> httpx.AsyncClient:
    """Return a client whose requests are JSON and have so many seconds. The environment variable `variable` has the
    token that servers ask for; without a value none is sent.

    Raises:
        UserError: no header can hold the token.
    """
    headers = {"Content-Type": "application/json", "Accept-Encoding": ENCODINGS}
    if token := os.environ.get(variable):
        if not (token.isascii() and token.isprintable() and token == token.strip()):
            problem = "is a token with a line end, a space at one of its ends, or a letter outside of ASCII"
            raise UserError(f"{variable} {problem}, which no header of HTTP can hold: export the token alone")
        headers["Authorization"] = f"Bearer {token}"
    return httpx.AsyncClient(
        timeout=timeout_s,
        verify=certificates(),
        headers=headers,
        limits=httpx.Limits(max_connections=max_connections),
        mounts=NO_PROXY_TO_OURSELVES,
    )


async def read_body(response: httpx.Response, limit: int, whole: bool = True) -> bytes:
    """Return the decompressed body, at most `limit` bytes of it.

    httpx decompresses each piece as a whole, however large it becomes. Here the limit holds at every moment.

    Raises:
        BodyError: the body is longer than `limit` and `whole` is true, or it cannot be decompressed.
    """
    encoding = response.headers.get("Content-Encoding", "identity").strip().lower() or "identity"
    if encoding not in ("identity", "gzip", "x-gzip", "deflate"):
        raise BodyError("the answer has a Content-Encoding other than gzip or deflate, which were asked for")
    unpack = None if encoding == "identity" else zlib.decompressobj(GZIP_OR_ZLIB)
    body = bytearray()
    try:
        async for piece in response.aiter_raw():
            body += piece if unpack is None else unpack.decompress(piece, limit + 1 - len(body))
            if len(body) > limit:
                break
    except zlib.error as error:
        raise BodyError(f"the answer cannot be decompressed ({error})") from None
    if len(body) > limit and whole:
        raise BodyError(f"the answer has more than {limit / 2**20:.3g} MiB, which no answer needs")
    return bytes(body[:limit])


def parse_json(body: bytes | str) -> Any:
    """Return the JSON value in `body`; raise BodyError if it is not JSON, nested too deeply, or holds a huge
    integer.
    """
    try:
        return json.loads(body, parse_int=integer)
    except RecursionError:
        raise BodyError("the answer is nested too deeply") from None
    except ValueError as error:
        if isinstance(error, BodyError):
            raise
        raise BodyError("the answer is not JSON") from None


def integer(digits: str) -> int:
    """Return the integer that `digits` spell; raise BodyError where no float could hold it."""
    if len(digits) > MAX_DIGITS:
        raise BodyError(f"the answer has a number of {len(digits)} digits")
    return int(digits)
