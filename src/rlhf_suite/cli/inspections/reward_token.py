"""The token of reward servers: it goes into an HTTP header, so it must be visible ASCII. Its value is never shown."""

from __future__ import annotations

import os
import string
from collections.abc import Iterator
from pathlib import Path

from rlhf_suite.config.problems import Problem
from rlhf_suite.config.reward import TOKEN, TextRewardConfig, is_http
from rlhf_suite.config.reward_rules import named
from rlhf_suite.config.runs import Run, ServeRMRun

VISIBLE = frozenset(string.ascii_letters + string.digits + string.punctuation)


def token_fits_a_header(run: Run, folder: Path | None) -> Iterator[Problem]:
    """A token that no header can hold would be quoted by the error of the HTTP library, or end the run."""
    token = os.environ.get(TOKEN, "")
    if not uses_token(run):
        return
    place = next((place for place, char in enumerate(token, 1) if char not in VISIBLE), None)
    if place is not None:
        kind = "a line end" if token[place - 1] in "\r\n" else "a character that is not visible ASCII"
        what = f"its value has {kind} at place {place} of {len(token)}, so it cannot be sent"
        yield Problem(TOKEN, what, f"export {TOKEN} with the token alone, in visible ASCII characters")


def uses_token(run: Run) -> bool:
    """Return whether the run sends the token to servers, or asks for it as one."""
    reward = getattr(run, "reward", None)
    if isinstance(reward, TextRewardConfig):
        return any(is_http(source.remote_url) for source in named(run).values())  # type: ignore[arg-type]
    return isinstance(run, ServeRMRun)
