"""What stands in the JSON object of a request, each with the type that it must have."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rlhf_suite.serving.http_server import BadRequest

Body = Mapping[str, Any]


def text(body: Body, key: str) -> str:
    """Return a text of a request; raise BadRequest if it is missing."""
    value = body.get(key)
    if not isinstance(value, str) or not value:
        raise BadRequest(f"{key}={value!r:.100} is not a text. Give one")
    return value


def optional_text(body: Body, key: str) -> str | None:
    """Return a text of a request, or None where it has none; raise BadRequest if it is something else."""
    return None if body.get(key) is None else text(body, key)


def whole(body: Body, key: str) -> int:
    """Return a number of a request; raise BadRequest if it is missing."""
    value = body.get(key)
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise BadRequest(f"{key}={value!r:.100} is not a whole number of at least 0. Give one")
    return value


def table(body: Body, key: str) -> Body:
    """Return an object within a request, empty where it has none; raise BadRequest if it is something else."""
    value = body.get(key)
    if value is not None and not isinstance(value, Mapping):
        raise BadRequest(f"{key}={value!r:.100} is not a JSON object. Give one")
    return value or {}
