"""The two kinds of error a user sees without a traceback: a mistake to mend, and a run that failed."""

from __future__ import annotations


class WithoutTraceback(Exception):
    """An error whose message says everything."""

    def _render_traceback_(self) -> list[str]:
        """Return the lines that a notebook shows in place of a traceback."""
        return f"{type(self).__name__}: {self}".splitlines()


class UserError(WithoutTraceback, ValueError):
    """A user's mistake: the message names the flag or file:line, the value and the remedy. Exit code 2."""


class FixableError(UserError):
    """A user's mistake with the remedy apart, for those who make a `Problem` of it."""

    def __init__(self, problem: str, fix: str) -> None:
        super().__init__(problem, fix)  # both as arguments, so that the error pickles
        self.what, self.fix = problem, fix

    def __str__(self) -> str:
        return f"{self.what}; {self.fix}"


class RunError(WithoutTraceback, RuntimeError):
    """A run that could not go on: the message names who failed, in which phase, and what it last said. Exit code 1."""
