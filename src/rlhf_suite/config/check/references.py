"""References in values: `${oc.env:NAME}` takes a path or a number from the environment, and never a secret.

The configuration of a run is written to config.yaml, the report, error messages and W&B. So a variable is read only if
its value is a path that exists, a number, or the name of a user, a host or of what Slurm says. A key is none of these,
whatever its variable is called.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from omegaconf.resolvers import oc

from rlhf_suite.config.check.problems import Problem
from rlhf_suite.errors import FixableError
from rlhf_suite.foreign_text import SECRET_NAMES

PLAIN_NAMES = re.compile(r"USER|LOGNAME|HOSTNAME|SLURM_\w+")
PLAIN_VALUE = re.compile(r"(?:[+-]?\d{1,12}(?:\.\d{1,12})?(?:[eE][+-]?\d{1,3})?|true|false)?", re.IGNORECASE)
WRAPPED = re.compile(r"^\w+ raised while resolving interpolation: ")
NO_DEFAULT = "\0"


GUARDS: list[None] = []  # as many as blocks are open, which may be within each other


@contextmanager
def guard_environment() -> Iterator[None]:
    """Have `${oc.env:NAME}` refuse what may be a secret in the block. Elsewhere it is OmegaConf's: code of the user's
    own may read files of its own."""
    OmegaConf.register_new_resolver("oc.env", from_environment, replace=True)
    GUARDS.append(None)
    try:
        yield
    finally:
        GUARDS.pop()
        if not GUARDS:
            OmegaConf.register_new_resolver("oc.env", oc.env, replace=True)


def from_environment(name: str, default: str | None = NO_DEFAULT) -> str | None:
    """Return the value of an environment variable, or the default of a reference to one that is not set.

    Raises:
        FixableError: it is not set and there is no default, or its value may be a secret, which is not in the message.
    """
    value = os.environ.get(name)
    if value is None:
        if default == NO_DEFAULT:
            raise FixableError(
                f"${{oc.env:{name}}} is not set", f"export {name}, or write ${{oc.env:{name},<default>}}"
            )
        return None if default is None else str(default)
    if not is_plain(name, value):
        problem = (
            "is neither an existing path nor a number, so it may be a secret: values are written to files, reports"
        )
        fix = f'leave a secret in the environment, where the suite reads keys; otherwise write "${name}" for the shell'
        raise FixableError(f"${{oc.env:{name}}} {problem}", fix)
    return value


def is_plain(name: str, value: str) -> bool:
    """Return whether the value of an environment variable can be written down."""
    if value.startswith("/") and os.path.exists(value):  # noqa: PTH110 (which never raises)
        return True
    if SECRET_NAMES.search(name):
        return False
    return PLAIN_NAMES.fullmatch(name) is not None or PLAIN_VALUE.fullmatch(value) is not None


def make_unresolved_problem(key: str, error: OmegaConfBaseException, fix: str) -> Problem:
    """Return the problem of a value that cannot be resolved; `fix` is the remedy of other errors than those of
    `from_environment`, which say their own."""
    cause: BaseException | None = error  # OmegaConf raises its own error while it handles that of a resolver
    while cause is not None and not isinstance(cause, FixableError):
        cause = cause.__cause__ or cause.__context__
    if cause is not None:
        return Problem(key, cause.what, cause.fix)
    return Problem(key, WRAPPED.sub("", str(error).splitlines()[0]), fix)
