"""Values as one writes them on the command line."""

from __future__ import annotations

from typing import Any


def spelled(value: Any) -> str:
    """null, true, [0.9,0.95], text."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, list):
        return f"[{','.join(spelled(item) for item in value)}]"
    return str(value)


def shown(value: Any) -> str:
    """As `spelled`, with quotes around a text so that its ends are seen."""
    return spelled(value) if not isinstance(value, str) else repr(value)
