"""The trial of a run's own code: what the user wrote is imported, and servers of tools start, before all else does.

`python -m rlhf_suite.preflight.trial <file descriptor> <parent pid>` is a process of its own, which
`inspections.own_code` starts and ends. It reads `Piece`s from standard input, tries one after the other, and writes a
line of JSON to the file for each: what is wrong and the remedy, or nothing.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import os
import pickle
import sys
from collections.abc import Callable
from dataclasses import dataclass
from types import MethodType
from typing import Any

from rlhf_suite.config.check.agent_file import OPENRLHF, OURS, ROLES, SKYRL, TRL, export_of
from rlhf_suite.config.declarations.agent import ChosenAgent
from rlhf_suite.foreign_text import what_of
from rlhf_suite.python_source import SourceError, import_failure, why_not_called
from rlhf_suite.registry import KINDS, WrongResult, callback
from rlhf_suite.train import callbacks

NEEDED = {OURS: ("reset", "step"), OPENRLHF: ("step",), SKYRL: ("init", "step")}


@dataclass(frozen=True)
class Piece:
    """A part of a run's own code: the flag that names it, and what tries it."""

    key: str
    attempt: Callable[[], None]
    limit_s: float
    must_end: bool = False  # a longer trial is a problem: the run would not wait longer either


def algorithm(kind: str, name: str) -> None:
    """Import a function of the user's that stands for an algorithm, and call it with a few numbers. Only what it
    returns then is judged: an error may be one of these numbers, which no run would give."""
    if KINDS[kind] is callback:
        callbacks.load(name)  # the run alone makes one: it may open a file or a connection
        return
    KINDS[kind].load(name)
    from rlhf_suite.preflight.trial_calls import CALLS

    if kind in CALLS:
        try:
            CALLS[kind](name)
        except WrongResult:
            raise
        except Exception:
            return


def reward_file(name: str) -> None:
    """Import a reward file, as the reward process does."""
    from rlhf_suite.rewards.file import make_scorer
    from rlhf_suite.rewards.worker import limit_memory

    limit_memory(is_rule=False)
    try:
        make_scorer(name)
    except (Exception, SystemExit) as error:
        raise import_failure(name, error) from error


def agent_file(chosen: ChosenAgent) -> None:
    """Import the file of an agent, and look at the class or the functions that it has."""
    from rlhf_suite.agents.compat import takes
    from rlhf_suite.agents.own_files import import_export
    from rlhf_suite.agents.tools import schema_of

    assert chosen.file is not None
    if chosen.config.needs("tools"):  # their descriptions are asked for by `tools`
        return
    export, exported = export_of(chosen.file), import_export(chosen)
    if chosen.config.needs("program"):
        return
    where = f"{chosen.file}: {export.name} ({export.form})"
    missing = [
        name for name in NEEDED.get(export.form, ()) if inspect.isclass(exported) and not hasattr(exported, name)
    ]
    if missing:
        raise SourceError(f"{where} has no {' and no '.join(missing)}", "define it (docs/agents.md)")
    given: dict[str, Any] = {"extras": {}} if export.form == SKYRL and takes(exported, "extras") else {}
    if (needed := why_not_called(exported, **given)) is not None:
        raise SourceError(f"{where} is made without arguments, and {needed}", "give them default values")
    if export.form == OURS:
        check_methods(exported, where)
    for name, function in vars(exported).items() if export.form == TRL else ():
        if inspect.isfunction(function) and not name.startswith("_") and name not in ("reset", "get_reward"):
            schema_of(MethodType(function, exported))


def check_methods(cls: Any, where: str) -> None:
    """Raise SourceError if `reset` and `step` of an environment take other arguments than they are called with, or if
    its roles cannot be roles."""
    from rlhf_suite.agents.players import problem_of_roles

    roles = getattr(cls, ROLES, ())
    if (problem := problem_of_roles(roles)) is not None:
        raise SourceError(f"{where}: {problem}", "name each role once (docs/agents_roles.md)")
    for name, arguments in (("reset", ("task",)), ("step", ("role", "turn") if roles else ("turn",))):
        method = inspect.getattr_static(cls, name) if inspect.isclass(cls) else None
        # A static method, for example, gets no object.
        if inspect.isfunction(method) and why_not_called(method, None, *arguments) is not None:
            why = f", because its class has roles {', '.join(roles)}" if roles and name == "step" else ""
            problem = f"{where}.{name} cannot be called as {name}({', '.join(arguments)}){why}"
            raise SourceError(problem, f"write def {name}(self, {', '.join(arguments)})")


def tools(chosen: ChosenAgent) -> None:
    """Ask all tools of an agent for their descriptions, as its first episode would: those of its file, and those of its
    MCP servers, which start for that and end again."""
    from rlhf_suite.agents.base import Task
    from rlhf_suite.agents.calls import EnvironmentFailure
    from rlhf_suite.agents.own_files import tool_environment, tools_of

    async def ask() -> None:
        environment = tool_environment(tools_of(chosen), chosen.config)
        try:
            await environment.reset(Task((), ""))
        except EnvironmentFailure as error:  # of a server
            raise SourceError(error.reason, "start it by hand to see what it lacks, or correct agent.tools") from error
        finally:
            await environment.close()

    asyncio.run(ask())


def problem_of(piece: Piece) -> list[str]:
    """Try a piece. Return what is wrong and the remedy; nothing if it can be used."""
    try:
        piece.attempt()
    except SourceError as error:
        return [error.what.removeprefix(f"{piece.key}="), error.fix]
    except (Exception, SystemExit) as error:
        return [what_of(error), "correct it (docs/own_code.md, docs/agents.md)"]
    return []


def main(report: int, parent: int) -> None:
    """Try all pieces, and end at once: threads that user code has begun do not matter."""
    from rlhf_suite.launch.processes import kill_with_parent

    kill_with_parent(parent)
    path, pieces = pickle.load(sys.stdin.buffer)
    sys.path[:] = path
    for piece in pieces:
        os.write(report, json.dumps(problem_of(piece)).encode() + b"\n")
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
