"""Reward files and reward servers: whether the function is there, and whether anybody answers."""

from __future__ import annotations

import ast
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path

from rlhf_suite.cli.inspections.network import first_hop, unreachable
from rlhf_suite.config.problems import Problem
from rlhf_suite.config.reward import is_http, urls
from rlhf_suite.config.reward_rules import named
from rlhf_suite.config.runs import LoopRun, Run, ScoredTextRun
from rlhf_suite.launch.slurm import allocation

FUNCTION, ARGUMENTS = "reward_func", 3
SIGNATURE = f"{FUNCTION}(queries, prompts, labels)"
CONNECT_S = 2.0


def remote_urls(run: Run) -> Mapping[str, str]:
    """The file or the servers of each source of reward, by the flag that names them."""
    if not isinstance(run, ScoredTextRun | LoopRun):
        return {}
    return {f"{key}.remote_url": source.remote_url for key, source in named(run).items() if source.remote_url}


def reward_files_define(run: Run, folder: Path | None) -> Iterator[Problem]:
    """Each reward file is Python and defines the function. The file is parsed, not run."""
    for key, name in remote_urls(run).items():
        if is_http(name):
            continue
        try:
            with warnings.catch_warnings(action="ignore"):
                tree = ast.parse(Path(name).read_bytes(), name)
                compile(tree, name, "exec", dont_inherit=True)  # finds more: a return outside of a function
        except (SyntaxError, ValueError) as error:  # a ValueError for a null byte, in Python 3.11
            line, reason = (error.lineno or 1, error.msg) if isinstance(error, SyntaxError) else (1, str(error))
            yield Problem(key, f"{name}:{line}: {reason}", "correct the file; it must be valid Python")
        except RecursionError:
            yield Problem(key, f"{name} is nested too deeply to be read as Python", "correct the file")
        except OSError as error:
            yield Problem(key, f"{name} cannot be read: {error.strerror}", "check its permissions")
        else:
            yield from function_problems(key, name, tree)


def function_problems(key: str, name: str, tree: ast.Module) -> Iterator[Problem]:
    """Whether the file binds the function at its top level, and, where it is defined there, takes the arguments."""
    functions = [each for each in tree.body if isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef)]
    bound = [found for statement in tree.body for found in bindings(statement)]
    if not any(found in (FUNCTION, "*") for found in bound):
        others = ", ".join(each.name for each in functions)
        what = f"{name} defines no {FUNCTION}" + (f"; its functions are {others}" if others else "")
        yield Problem(key, what, f"define {SIGNATURE} in it")
    for each in functions:
        count = len(each.args.posonlyargs) + len(each.args.args)
        is_plain = each.name == FUNCTION and not each.decorator_list and each.args.vararg is None
        if is_plain and count < ARGUMENTS:
            what = f"{name}:{each.lineno}: {FUNCTION} takes {count} arguments, not {ARGUMENTS}"
            yield Problem(key, what, f"write def {SIGNATURE}")


def bindings(statement: ast.AST) -> Iterator[str]:
    """The names that a statement of a module may bind; `*` for all names of another module."""
    if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        yield statement.name
    elif isinstance(statement, ast.Import | ast.ImportFrom):
        yield from (each.asname or each.name for each in statement.names)
    elif isinstance(statement, ast.Name) and isinstance(statement.ctx, ast.Store):
        yield statement.id
    else:
        for child in ast.iter_child_nodes(statement):
            yield from bindings(child)


def reward_servers_answer(run: Run, folder: Path | None) -> Iterator[Problem]:
    """Each source of reward has a server that accepts connections. Only asked where the run will ask for rewards."""
    here = allocation() if folder is not None else None
    if folder is None or (here is not None and here.rank > 0):
        return
    for key, value in remote_urls(run).items():
        if not is_http(value):
            continue
        servers = {first_hop(url) for url in urls(value)}
        failed = unreachable(servers, CONNECT_S)
        if len(failed) == len(servers):
            said = "; ".join(f"{host}:{port}: {reason}" for (host, port), reason in failed.items())
            fix = "start the server first (a served reward model says where it listens), or correct the address"
            yield Problem(key, f"no reward server accepts a connection: {said}", fix)
