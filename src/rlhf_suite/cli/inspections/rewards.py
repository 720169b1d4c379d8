"""Inspect the sources of rewards: reward files define the function, servers answer, and the token can be sent."""

from __future__ import annotations

import ast
import os
import string
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path

from rlhf_suite.cli.inspections.network import first_hop, unreachable
from rlhf_suite.config.problems import Problem
from rlhf_suite.config.reward import TOKEN, TextRewardConfig, is_http, urls
from rlhf_suite.config.reward_rules import named
from rlhf_suite.config.runs import LoopRun, Run, ScoredTextRun, ServeRMRun
from rlhf_suite.launch.slurm import allocation

FUNCTION, ARGUMENTS = "reward_func", 3
SIGNATURE = f"{FUNCTION}(queries, prompts, labels)"
CONNECT_S = 2.0
VISIBLE = frozenset(string.ascii_letters + string.digits + string.punctuation)


def remote_urls(run: Run) -> Mapping[str, str]:
    """Return the reward file or the servers of each source of rewards, by flag."""
    if not isinstance(run, ScoredTextRun | LoopRun):
        return {}
    return {f"{key}.remote_url": source.remote_url for key, source in named(run).items() if source.remote_url}


def reward_files_define(run: Run, folder: Path | None) -> Iterator[Problem]:
    """Yield a problem for each reward file that is not Python or does not define the function. Files are not run."""
    for key, name in remote_urls(run).items():
        if is_http(name):
            continue
        try:
            with warnings.catch_warnings(action="ignore"):
                tree = ast.parse(Path(name).read_bytes(), name)
                compile(tree, name, "exec", dont_inherit=True)  # finds more, such as a return outside of a function
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
    """Yield a problem if the file has no top-level function of this name, or if it takes too few arguments."""
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
    """Yield the names that a statement of a module may bind; `*` stands for all names of another module."""
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
    """Yield a problem for each source of which no server accepts connections. Only the node that will use them asks."""
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
            fix = "start the server first (task=serve_rm prints its address), or correct the address"
            yield Problem(key, f"no reward server accepts a connection: {said}", fix)


def token_fits_a_header(run: Run, folder: Path | None) -> Iterator[Problem]:
    """Yield a problem if the token cannot be sent in an HTTP header: the error of the HTTP library would quote it."""
    token = os.environ.get(TOKEN, "")
    if not uses_token(run):
        return
    place = next((place for place, char in enumerate(token, 1) if char not in VISIBLE), None)
    if place is not None:
        kind = "a line end" if token[place - 1] in "\r\n" else "a character that is not visible ASCII"
        what = f"its value has {kind} at position {place} of {len(token)}, so it cannot be sent"
        yield Problem(TOKEN, what, f"export {TOKEN} with the token alone, in visible ASCII characters")


def uses_token(run: Run) -> bool:
    """Return whether the run sends the token to reward servers, or requires it as a server."""
    reward = getattr(run, "reward", None)
    if isinstance(reward, TextRewardConfig):
        return any(is_http(source.remote_url) for source in named(run).values())  # type: ignore[arg-type]
    return isinstance(run, ServeRMRun)
