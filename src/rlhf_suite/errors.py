"""The two kinds of error a user sees without a traceback: a mistake to mend, and a run that failed."""

from __future__ import annotations


class UserError(ValueError):
    """A user's mistake: the message names the flag or file:line, the value and the remedy. Exit code 2."""


class RunError(RuntimeError):
    """A run that could not go on: the message names who failed, in which phase, and what it last said. Exit code 1."""
