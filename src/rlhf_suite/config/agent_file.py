"""The file of train.agent_func_path: which of the known forms it has, found without running it."""

from __future__ import annotations

import ast
from collections.abc import Callable, Container, Iterator
from dataclasses import dataclass
from pathlib import Path

from rlhf_suite.python_source import FunctionDef, SourceError, bound_names, functions, parsed, wrong_count

OURS, OPENRLHF, SKYRL, GYMNASIUM, TRL, TOOLS = "environment", "openrlhf", "skyrl", "gymnasium", "trl", "tools"
PROGRAM = "program"
ENVIRONMENTS = (OURS, OPENRLHF, SKYRL, GYMNASIUM, TRL)
FORMS = (
    "a class Environment with async reset(task), step(turn) and close(); a class AgentInstance (OpenRLHF); a class "
    "derived from BaseTextEnv (SkyRL) or from gymnasium.Env with texts; a class with reset(self, **row) and methods "
    "that are tools (TRL); tools = [functions]; or a function run_agent(task, base_url, api_key)"
)
RUN_AGENT = "run_agent"
FIX = "define one of these: " + FORMS + " (docs/agents.md)"


@dataclass(frozen=True)
class Export:
    """What a file has for agents: the form, and the name of the class or list."""

    form: str
    name: str


def export_of(file: str) -> Export:
    """Return what a file has for agents, the first of the known forms.

    Raises:
        SourceError: there is no such file, it is not Python, or it has none of the forms.
    """
    path = Path(file).expanduser().resolve()
    if path.suffix != ".py" or not path.is_file():
        raise SourceError(f"{file} is not a Python file (seen from {Path.cwd()})", "correct the path")
    tree = parsed(path)
    classes = [node for node in tree.body if isinstance(node, ast.ClassDef)]
    names = bound_names(tree)
    if RUN_AGENT in names:
        check_program(path, tree)
        return Export(PROGRAM, RUN_AGENT)
    tests: list[tuple[str, Callable[[ast.ClassDef], bool]]] = [
        (OURS, lambda node: node.name == "Environment"),
        (OPENRLHF, lambda node: node.name == "AgentInstance"),
        (SKYRL, lambda node: "BaseTextEnv" in bases(node)),
        (GYMNASIUM, lambda node: bool({"Env", "gym.Env", "gymnasium.Env"} & set(bases(node)))),
        (TRL, has_methods_as_tools),
    ]
    for form, fits in tests:
        for node in classes:
            if fits(node):
                return Export(form, node.name)
    if "Environment" in names:  # imported from elsewhere
        return Export(OURS, "Environment")
    if "tools" in names:
        return Export(TOOLS, "tools")
    raise refusal(path, names)


def check_program(path: Path, tree: ast.Module) -> None:
    """Raise SourceError if run_agent, defined in this file, takes other arguments than it is called with."""
    node = next((each for each in functions(tree) if each.name == RUN_AGENT), None)
    if node is not None and not node.decorator_list and (count := wrong_count(node, 3)) is not None:
        what = f"{path}:{node.lineno}: {RUN_AGENT} takes {count} arguments, not 3"
        raise SourceError(what, f"write def {RUN_AGENT}(task, base_url, api_key)")


def refusal(path: Path, names: Container[str]) -> SourceError:
    """Return why a file that has none of the forms cannot be used."""
    if "AgentExecutor" in names:
        what = f"{path} has an AgentExecutor and no AgentInstance: the suite itself asks the engines, for exact tokens"
        return SourceError(what, "put what it does between the turns into a class AgentInstance with reset and step")
    if "load_environment" in names:
        what = f"{path} makes an environment of verifiers, which runs in a Python environment of its own"
        return SourceError(what, FIX)
    return SourceError(f"{path} has nothing that an agent could use", FIX)


def bases(node: ast.ClassDef) -> list[str]:
    """Return the base classes of a class, as they are written."""
    return [ast.unparse(base) for base in node.bases]


def methods(node: ast.ClassDef) -> Iterator[FunctionDef]:
    return (each for each in node.body if isinstance(each, FunctionDef))


def has_methods_as_tools(node: ast.ClassDef) -> bool:
    """Return whether a class is an environment of TRL: reset takes the row by name, and there are other methods."""
    own = {each.name: each for each in methods(node)}
    reset = own.get("reset")
    others = [name for name in own if not name.startswith("_") and name not in ("reset", "get_reward")]
    return reset is not None and reset.args.kwarg is not None and bool(others)
