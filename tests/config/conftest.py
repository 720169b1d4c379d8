"""Command lines checked in this process, as `main` checks them."""

from __future__ import annotations

import shlex
from collections.abc import Callable

import pytest

from rlhf_suite.composition.arguments import parse
from rlhf_suite.preflight.jobs import Preflight, preflight


@pytest.fixture(scope="session")
def checked() -> Callable[[str], Preflight]:
    """Check one command line, written as in a shell."""
    return lambda line: preflight(parse(shlex.split(line)))
