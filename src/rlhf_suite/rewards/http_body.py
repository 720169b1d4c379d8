"""The body of a reward server's answer: read up to a limit, decompressed by hand, and parsed without surprises.

A server is not trusted: its answer may be endless, a gzip bomb, nested a thousand levels deep or hold an integer of a
million digits. Each of these is an `BodyError`, which fails the rows of that request and nothing else.
"""

from __future__ import annotations

import json
import zlib
from typing import Any

import httpx

# An answer holds a few numbers per response: no honest one comes near this.
BASE_BYTES, BYTES_PER_ROW = 1 << 20, 64 << 10
MAX_DIGITS = 320  # more than the largest float has
ENCODINGS = "gzip, deflate"
GZIP_OR_ZLIB = zlib.MAX_WBITS | 32


class BodyError(ValueError):
    """The answer cannot be used, and asking again would not help."""


async def read_body(response: httpx.Response, limit: int, whole: bool = True) -> bytes:
    """Return the body, decompressed, of at most `limit` bytes. A longer one is an error, or is cut if not `whole`.

    httpx decompresses what has arrived at once, however large that becomes; here the limit holds at every moment.
    """
    encoding = response.headers.get("Content-Encoding", "identity").strip().lower() or "identity"
    if encoding not in ("identity", "gzip", "x-gzip", "deflate"):
        raise BodyError("the answer is compressed in another way than was asked for (Content-Encoding)")
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
        raise BodyError(f"the answer has more than {limit / 2**20:.3g} MiB, which no scores need")
    return bytes(body[:limit])


def parsed(body: bytes) -> Any:
    """Return the JSON value in `body`."""
    try:
        return json.loads(body, parse_int=integer)
    except RecursionError:
        raise BodyError("the answer is nested too deeply") from None
    except ValueError as error:
        if isinstance(error, BodyError):
            raise
        raise BodyError("the answer is not JSON") from None


def integer(digits: str) -> int:
    """Return an integer that a float can hold."""
    if len(digits) > MAX_DIGITS:
        raise BodyError(f"the answer has a number of {len(digits)} digits")
    return int(digits)
