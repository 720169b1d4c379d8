"""Prompts for tests of what follows them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rlhf_suite.data.text_encoders import Prompt


def prompt(
    index: int = 0, ids: Sequence[int] = (1, 2), text: str = "", datasource: str = "default", **more: Any
) -> Prompt:
    """Return the prompt with this number; `more`: further fields."""
    values = {"label": "", "where": f"rows:{index}", **more}
    return Prompt(list(ids), text, datasource=datasource, index=index, **values)
