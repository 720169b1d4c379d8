"""What a machine lacks that a flag needs: a GPU, a Python package, or the token of a server. The preflight asks here,
and so does a process that may be on another machine than the preflight was."""

from __future__ import annotations

import os
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

from rlhf_suite.config.check.problems import ConfigurationError, Problem
from rlhf_suite.config.declarations.conditions import Need
from rlhf_suite.config.declarations.flag_types import spell
from rlhf_suite.config.declarations.reward import TOKEN
from rlhf_suite.config.declarations.runs import Run
from rlhf_suite.config.declarations.tools import THIS_MACHINE, TRAIN_KEY, TRAIN_TOKEN
from rlhf_suite.errors import FixableError


@dataclass(frozen=True)
class Package:
    """A Python package that only some flags need: its name, that of its module, and the extra that installs it."""

    name: str
    module: str
    extra: str


BITSANDBYTES = Package("bitsandbytes", "bitsandbytes", "qlora")
LIGER_KERNEL = Package("liger-kernel", "liger_kernel", "gpu")
REASONING_GYM = Package("reasoning-gym", "reasoning_gym", "gym")


def find_missing(key: str, package: Package) -> Problem | None:
    """Return the problem of a flag that needs a package which is not installed; None if it is."""
    if find_spec(package.module) is not None:
        return None
    problem = f"the package {package.name} is not installed"
    return Problem(key, problem, f"run pip install 'rlhf-suite[{package.extra}]'")


def refuse_missing(flag: str, package: Package) -> None:
    """Raise FixableError where a package is not installed that a flag needs, which is given with its value."""
    if (problem := find_missing(flag, package)) is not None:
        raise FixableError(f"{flag}: {problem.what}", problem.fix)


def make_no_gpu_problem(key: str, value: Any, need: Need, off: str) -> Problem:
    """Return the problem of a flag with this need on a machine without a GPU; `off` is the value to write instead."""
    problem = f"{spell(value)} needs a GPU, but this machine has none: {need.why}"
    return Problem(key, problem, f"write {key}={off}")


def refuse_without_gpu(key: str, value: Any, need: Need, device: str) -> None:
    """Raise FixableError where a process is on another device than a flag with this need allows."""
    if not need.condition.is_met(device):
        problem = make_no_gpu_problem(key, value, need, need.off or spell(False))
        raise FixableError(f"{key}={problem.what}", problem.fix)


# Of the task of a server: the environment variable with its token, how a token begins, and where else it has to be.
TOKENS = {
    "serve_rm": (TOKEN, "", " and where rewards are requested"),
    "serve_train": (TRAIN_TOKEN, TRAIN_KEY, ", and TINKER_API_KEY with the same value where clients run"),
}


def find_token_problem(run: Run) -> Problem | None:
    """Return what is wrong with the token of a server; None where it is right, or where none is needed."""
    variable, beginning, clients = TOKENS[run.task]
    token, host = os.environ.get(variable), run.serve.host
    if not token and host not in THIS_MACHINE:
        fix = f"export {variable}={beginning}<secret> here{clients}, or remove serve.host"
        return Problem("serve.host", f"{host} lets other machines connect, but there is no token", fix)
    if token and not token.startswith(beginning):
        problem = f"does not begin with {beginning}, and clients refuse such a key"
        return Problem(variable, problem, f"put {beginning} before the secret")
    return None


def read_token(run: Run) -> str | None:
    """Return the token that clients of a server send; None: only this machine can connect, and needs none.

    Raises:
        ConfigurationError: there is none although other machines can connect, or clients refuse it.
    """
    if (problem := find_token_problem(run)) is not None:
        raise ConfigurationError([problem])
    return os.environ.get(TOKENS[run.task][0]) or None
