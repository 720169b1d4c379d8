"""The file of train.agent_func_path: which of the known forms it has, found without running it."""

from __future__ import annotations

import ast
from collections.abc import Callable, Container, Iterable, Iterator
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

from rlhf_suite.config.declarations.agent import ChosenAgent
from rlhf_suite.disk import resolve_home
from rlhf_suite.python_source import (
    FunctionDef,
    SourceError,
    bindings,
    functions,
    list_bound_names,
    parse_file,
)
from rlhf_suite.registry import program

OURS, OPENRLHF, SKYRL, GYMNASIUM, TRL, TOOLS = "environment", "openrlhf", "skyrl", "gymnasium", "trl", "tools"
OPENRLHF_EXECUTOR, OPENRLHF_STEP = "openrlhf executor", "openrlhf step"
PROGRAM = "program"
ENVIRONMENTS = (OURS, OPENRLHF, OPENRLHF_EXECUTOR, OPENRLHF_STEP, SKYRL, GYMNASIUM, TRL)
RAW = (OPENRLHF, OPENRLHF_EXECUTOR, OPENRLHF_STEP)  # those that answer with text and not with messages
FORMS = (
    "a class Environment with async reset(task), step(turn) and close(); a class AgentInstance, or an AgentExecutor "
    "that names another class (OpenRLHF); a function step(state, action, label) (its first versions); a class "
    "derived from BaseTextEnv (SkyRL) or from gymnasium.Env with texts; a class with reset(self, **row) and methods "
    "that are tools (TRL); tools = [functions]; or a function run_agent(task, base_url, api_key)"
)
RUN_AGENT, ROLES = "run_agent", "roles"
SIGNATURE = program.signature(RUN_AGENT).removeprefix("def ")
FIX = "define one of these: " + FORMS + " (docs/agents_environments.md)"


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
    path = resolve_home(file).resolve()
    if path.suffix != ".py" or not path.is_file():
        raise SourceError(f"{file} is not a Python file (seen from {Path.cwd()})", "correct the path")
    tree = parse_file(path)
    classes = [node for node in tree.body if isinstance(node, ast.ClassDef)]
    names = list_bound_names(tree)
    if RUN_AGENT in names:
        program.find_declaration(f"{path}:{RUN_AGENT}")  # raises an error if it takes other arguments
        return Export(PROGRAM, RUN_AGENT)
    check_executor(path, classes)
    fitting = (Export(form, node.name) for form, fits in CLASSES.items() for node in classes if fits(node))
    others = (Export(form, name) for name, form in OTHERS.items() if name in names)
    if (export := next(chain(fitting, others), None)) is not None:
        return export
    if any(
        function.name == "step" and arguments_of(function)[:2] == ["state", "action"] for function in functions(tree)
    ):
        return Export(OPENRLHF_STEP, "step")
    raise refusal(path, names)


def has_tools(file: str) -> bool:
    """Return whether a file has a list of tools, whatever else it has; false for a file that cannot be read."""
    try:
        tree = parse_file(resolve_home(file).resolve())
    except SourceError:
        return False
    return any(TOOLS in bindings(node) for node in tree.body if not isinstance(node, ast.Import))


def has_tools_beside(chosen: ChosenAgent) -> bool:
    """Return whether an agent has an environment and tools that the suite calls, of its file or of MCP servers. Forms
    that answer with raw text have none."""
    has_environment = chosen.config.needs("environment")
    if not has_environment or chosen.file is None:
        return has_environment and bool(chosen.config.tools)
    try:
        form = export_of(chosen.file).form
    except SourceError:
        return False
    return form in ENVIRONMENTS and form not in RAW and (bool(chosen.config.tools) or has_tools(chosen.file))


def always_scores(file: str) -> bool:
    """Return whether a file has an environment that gives a reward to every episode: one of Gymnasium, of TRL with
    get_reward, or one with roles."""
    export, node = environment_in(file)
    asked = node is not None and any(method.name == "get_reward" for method in methods(node))
    return export.form == GYMNASIUM or (export.form == TRL and asked) or has_roles(file)


def has_roles(file: str) -> bool:
    """Return whether a file has an environment of this suite whose class names roles; false for a file that cannot be
    read."""
    export, node = environment_in(file)
    return export.form == OURS and node is not None and any(ROLES in bindings(statement) for statement in node.body)


def environment_in(file: str) -> tuple[Export, ast.ClassDef | None]:
    """Return what a file has for agents, and its class if that is defined in it; nothing for a file that cannot be
    read."""
    try:
        export, tree = export_of(file), parse_file(resolve_home(file).resolve())
    except SourceError:
        return Export("", ""), None
    classes = (statement for statement in tree.body if isinstance(statement, ast.ClassDef))
    return export, next((node for node in classes if node.name == export.name), None)


def check_executor(path: Path, classes: Iterable[ast.ClassDef]) -> None:
    """Raise SourceError if an AgentExecutor of OpenRLHF asks the engines itself."""
    own = (
        method
        for node in classes
        if node.name == "AgentExecutor"
        for method in methods(node)
        if method.name == "execute"
    )
    for node in own:
        problem = (
            f"{path}:{node.lineno}: AgentExecutor has its own execute(): the suite itself asks the engines, so that "
        )
        problem += "each token is trained on as it was sampled"
        fix = f"for a program that asks a server for chat completions write agent.kind=endpoint and {SIGNATURE}, which "
        fix += "gets the address of such a server (docs/from_openrlhf.md#agents); else put what it does between the "
        raise SourceError(problem, f"{fix}turns into a class AgentInstance with reset and step, and remove execute()")


def arguments_of(node: FunctionDef) -> list[str]:
    """Return the names of the arguments that a function takes by position."""
    return [argument.arg for argument in (*node.args.posonlyargs, *node.args.args)]


def refusal(path: Path, names: Container[str]) -> SourceError:
    """Return why a file that has none of the forms cannot be used."""
    if "load_environment" in names:
        problem = f"{path} makes an environment of the library verifiers, which needs its own Python environment"
        return SourceError(problem, FIX)
    return SourceError(f"{path} contains nothing that an agent can use", FIX)


def bases(node: ast.ClassDef) -> list[str]:
    """Return the base classes of a class, as they are written."""
    return [ast.unparse(base) for base in node.bases]


def methods(node: ast.ClassDef) -> Iterator[FunctionDef]:
    return (statement for statement in node.body if isinstance(statement, FunctionDef))


def has_methods_as_tools(node: ast.ClassDef) -> bool:
    """Return whether a class is an environment of TRL: reset takes columns of the row by name, and there are other
    methods, none of which is a step."""
    own = {method.name: method for method in methods(node)}
    reset = own.get("reset")
    others = [name for name in own if not name.startswith("_") and name not in ("reset", "get_reward")]
    return reset is not None and bool(others) and (reset.args.kwarg is not None or not {"step", "close"} & own.keys())


CLASSES: dict[str, Callable[[ast.ClassDef], bool]] = {
    OURS: lambda node: node.name == "Environment",
    OPENRLHF: lambda node: node.name == "AgentInstance",
    SKYRL: lambda node: "BaseTextEnv" in bases(node),
    GYMNASIUM: lambda node: bool({"Env", "gym.Env", "gymnasium.Env"} & set(bases(node))),
    TRL: has_methods_as_tools,
}
# Names that may be imported from elsewhere.
OTHERS = {"Environment": OURS, "AgentInstance": OPENRLHF, "AgentExecutor": OPENRLHF_EXECUTOR, "tools": TOOLS}
