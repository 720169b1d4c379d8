"""Lets the kit run on a machine that has an older PyTorch than the suite needs: a bare machine has what it has.

`python -m pytest -p older_torch` does the same for tests.
"""

from __future__ import annotations

import inspect
from functools import wraps
from typing import Any


def take_grouped_queries() -> None:
    """Have the variable-length attention of torch take `enable_gqa`. Before PyTorch 2.12 it has no such argument: its
    kernel computes groups of query heads without being told."""
    from torch.nn.attention import varlen

    own: Any = varlen.varlen_attn
    if "enable_gqa" in inspect.signature(own).parameters:
        return

    @wraps(own)
    def varlen_attn(*args: Any, enable_gqa: bool = False, **settings: Any) -> Any:
        return own(*args, **settings)

    varlen.varlen_attn = varlen_attn


def pytest_configure() -> None:
    take_grouped_queries()
