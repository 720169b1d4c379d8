"""Algorithms are declared once, at their function; everybody else asks the declaration.

    @estimator(needs=("rewards", "values"), reads=("gamma", "lambd"))
    def gae(inputs: CreditInput, config: AdvantageConfig) -> Credit:
        \"\"\"Generalised advantage estimation (Schulman et al. 2016).\"\"\"

The name is that of the function (or `name=`), the help is the first paragraph of its docstring, `needs` says what a run
must provide for it, and `reads` names the flags that it reads and others of its kind may not. Choices of flags, help,
checks, unused flags, placement and the reference pages follow from that.

A user's own function counts as much: `path/to/file.py:function` or `package.module:function` in place of a name. It may
be declared with the same decorator; without one it has the needs of its kind's default, and may read any flag.

Declarations are read from the source with `ast`, without importing it: the functions import torch, and the command line
does not. `Kind.load` imports the module where the function is called.
"""

from __future__ import annotations

import ast
import importlib
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, is_dataclass
from difflib import get_close_matches
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

from rlhf_suite.disk import resolve_home
from rlhf_suite.python_source import (
    SOURCE,
    FunctionDef,
    SourceError,
    check_parameters,
    functions,
    import_failure,
    import_file,
    list_bound_names,
    module_file,
    parse_file,
    signature,
    summary,
)

PACKAGE = "rlhf_suite"
NUMBER = "number:"  # begins a need: a number that a reward or an agent gives to each sample
ANY_NUMBER = "number:<name>"  # among what a kind can need
Function = TypeVar("Function", bound=Callable[..., Any])


class WrongResult(SourceError):
    """A function of the user's returned something of another type or shape than its kind."""


@dataclass(frozen=True)
class Declaration:
    """What a function says about itself."""

    name: str  # as flags spell it
    function: str
    help: str
    needs: tuple[str, ...]
    reads: tuple[str, ...] | None  # names of flags; None: it is not known, and may be any of them
    file: Path | None  # None: the function is imported into its module from elsewhere, or the module is compiled
    line: int = 0


@dataclass(frozen=True)
class Kind:
    """A kind of algorithm, and the decorator that declares one.

    `parameters` are those that a function of this kind is called with, by position, and `by_name` those that it gets by
    name if it has them. `below` is where the flags of `reads` are, seen from the section of the flag that names the
    algorithm. One that `may_wait` may be `async def`.
    """

    name: str
    title: str
    modules: tuple[str, ...]  # where the suite declares its own
    parameters: tuple[str, ...]
    can_need: tuple[str, ...] = ()
    default_needs: tuple[str, ...] = ()
    below: str = ""
    by_name: tuple[str, ...] = ()
    may_wait: bool = False

    def __call__(
        self, *, name: str | None = None, needs: tuple[str, ...] | None = None, reads: tuple[str, ...] = ()
    ) -> Callable[[Function], Function]:
        """Declare the decorated function. The declaration is read from the source; the function stays as it is."""
        return lambda function: function

    def names(self) -> tuple[str, ...]:
        """Return the names of the suite's own, in the order of their declaration."""
        return tuple(self.builtin())

    def builtin(self) -> dict[str, Declaration]:
        """Return the suite's own declarations by name."""
        paths = [SOURCE.joinpath(*module.split(".")).with_suffix(".py") for module in self.modules]
        declarations = [declaration for path in paths for kind, declaration in _declarations(path) if kind == self.name]
        return {declaration.name: declaration for declaration in declarations}

    def find_declaration(self, name: str) -> Declaration:
        """Return the declaration of a name, of the suite or of a user's file.

        Raises:
            SourceError: the name leads to no function of this kind.
        """
        if not is_own(name):
            known = self.builtin()
            if name in known:
                return known[name]
            problem = f"{name!r} is not one of {', '.join(known)}" if known else f"{name!r} names no function"
            raise SourceError(problem, f"write {next(iter(known))}" if known else "write <file.py>:<function>")
        place, _, function = name.rpartition(":")
        path = _file_of(place, function, self)
        if path is None:
            return Declaration(name, function, "", self.default_needs, None, None)
        return self._in_file(name, path, function)

    def needs(self, name: str, need: str) -> bool:
        """Return whether an algorithm needs something."""
        assert need in self.can_need, (self.name, need)
        return need in self.find_declaration(name).needs

    def numbers(self, name: str) -> tuple[str, ...]:
        """Return the numbers of samples that an algorithm needs, by their names."""
        return tuple(need.removeprefix(NUMBER) for need in self.find_declaration(name).needs if need.startswith(NUMBER))

    def may_need(self, need: str) -> bool:
        """Return whether there is such a need."""
        return need in self.can_need or (ANY_NUMBER in self.can_need and need.startswith(NUMBER) and need != NUMBER)

    def that_need(self, need: str) -> tuple[str, ...]:
        """Return the names of the suite's own that need something."""
        assert need in self.can_need, (self.name, need)
        return tuple(name for name, declaration in self.builtin().items() if need in declaration.needs)

    def without(self, need: str) -> tuple[str, ...]:
        """Return the names of the suite's own that do not need something."""
        return tuple(name for name in self.names() if name not in self.that_need(need))

    def reads(self, name: str, flag: str) -> bool:
        """Return whether an algorithm reads a flag, named as in `reads`; one without a declaration may read any."""
        read = self.find_declaration(name).reads
        return read is None or flag in read or not self.that_read(flag)

    def that_read(self, flag: str) -> tuple[str, ...]:
        """Return the names of the suite's own that read a flag; none where the flag has nothing to do with the kind."""
        return tuple(name for name, declaration in self.builtin().items() if flag in (declaration.reads or ()))

    def flags(self) -> tuple[str, ...]:
        """Return the flags that some of the suite's own read and others do not."""
        return tuple(dict.fromkeys(flag for declaration in self.builtin().values() for flag in declaration.reads or ()))

    def load(self, name: str) -> Callable[..., Any]:
        """Import the module of a name, and return its function."""
        if not is_own(name):
            declared = self.find_declaration(name)
            assert declared.file is not None, name
            module = importlib.import_module(
                ".".join((PACKAGE, *declared.file.relative_to(SOURCE).with_suffix("").parts))
            )
            function: Callable[..., Any] = getattr(module, declared.function)
            return function
        place, _, attribute = name.rpartition(":")
        try:
            module = import_file(Path(place).resolve()) if place.endswith(".py") else importlib.import_module(place)
            loaded: Callable[..., Any] = getattr(module, attribute)
        except (Exception, SystemExit) as error:
            raise import_failure(name, error) from error
        return loaded

    def wrong_result(self, name: str, result: object, wanted: str) -> WrongResult:
        """Return the error of a function of this kind that returned something else than `wanted`."""
        declared = self.find_declaration(name)
        where = f"{declared.file}:{declared.line}: " if declared.file is not None else ""
        problem = f"{where}{declared.function} returned {describe_value(result)}, as {self.title} {name}"
        return WrongResult(problem, f"return {wanted} (docs/own_code.md)")

    def _in_file(self, name: str, path: Path, function: str) -> Declaration:
        tree = parse_file(path)
        node = next((definition for definition in functions(tree) if definition.name == function), None)
        if node is None:
            if {function, "*"} & list_bound_names(tree):  # imported or assigned: what it takes is not known
                return Declaration(name, function, "", self.default_needs, None, None)
            others = ", ".join(definition.name for definition in functions(tree))
            problem = f"{path} defines no {function}" + (f"; its functions are {others}" if others else "")
            raise SourceError(problem, f"write {self.signature(function)} in it")
        declared = [*_read_declarations(node, path, _aliases(tree))]
        if wrong := next((kind for kind, _ in declared if kind != self.name), None):
            problem = f"{path}:{node.lineno}: {function} is declared as @{wrong}, and here @{self.name} is meant"
            raise SourceError(problem, f"declare it with @{self.name}, or name another function")
        if isinstance(node, ast.AsyncFunctionDef) and not self.may_wait:
            problem = f"{path}:{node.lineno}: {function} is async, and {self.title}s are not awaited"
            raise SourceError(problem, f"write {self.signature(function)} without async")
        if len(node.decorator_list) == len(declared):
            check_parameters(node, path, self.parameters, self.by_name)
        if not declared:
            return Declaration(name, function, summary(node), self.default_needs, None, path, node.lineno)
        declaration = declared[0][1]
        return Declaration(name, function, declaration.help, declaration.needs, declaration.reads, path, node.lineno)

    def signature(self, function: str) -> str:
        """Return how a function of this kind begins."""
        return signature(function, self.parameters)


# Of estimators: `parts` are those in algo.advantage.reward_parts, `successes` are rewards of 0 or more.
CREDIT = ("rewards", "values", "greedy", "groups", "teacher", "entropies", "parts", "successes", ANY_NUMBER)
# Of policy losses: a ratio of whole sequences; tokens that are chosen by their covariance, in one of two ways.
POLICY = ("sequences", "covariance_band", "largest_covariances")
AVERAGED = ("mask", "segments", "num_sequences", "horizon")
PAIR, TERMS = ("chosen", "rejected", "config"), ("reference", "chosen_loss")
CHECKED = ("label", "tests", "locked_process", "time_limit")
# Of agents: someone answers turns, data.reward_columns, what the file of train.agent_func_path must have, messages that
# the chat template must show between turns, strings that end a turn, a jail for programs; prompts without images, no
# other agents beside it, an estimator that compares whole episodes.
AGENT = (
    *("turns", "columns", "environment", "tools", "program", "user_messages", "tool_messages", "stop_strings", "jail"),
    *("text", "all_rows", "whole_episodes"),
)
RULES = ("rewards.rules", "rewards.mathematics", "rewards.code", "rewards.gym", "rewards.ifeval")

ESTIMATORS = ("algo.advantage", "algo.group_objectives")

estimator = Kind("estimator", "advantage estimator", ESTIMATORS, ("inputs", "config"), CREDIT, ("rewards",))
agent = Kind("agent", "agent", ("agents.kinds",), ("setup",), AGENT, ("turns", "columns"))
python_style = Kind("python_style", "style of Python code", ("agents.kinds",), ("setup", "make"), AGENT)
correction = Kind(
    "correction", "mode of the correction", ("algo.correction",), ("inputs", "config"), ("ratio", "unit_weight")
)
gating = Kind("gating", "gating of the correction", ("algo.correction",), ("inputs", "config"), ("upper_bound",))
policy_loss = Kind("policy_loss", "policy loss", ("losses.policy",), ("tokens", "config"), POLICY)
aggregation = Kind("aggregation", "aggregation mode", ("losses.reduce",), AVERAGED, ("sequences", "tokens"))
preference_loss = Kind("preference_loss", "preference loss", ("losses.preference",), PAIR, TERMS, ("reference",))
reward_loss = Kind("reward_loss", "loss of a reward model", ("losses.preference",), (*PAIR[:2], "margin"), ("margin",))
divergence = Kind("divergence", "divergence", ("losses.distillation",), ("teacher", "student"))
kl_estimator = Kind("kl_estimator", "KL estimator", ("algo.kl",), ("log_ratio",), ("reward",))
schedule = Kind("schedule", "learning-rate schedule", ("train.schedules",), ("moment", "config"))
reward_rule = Kind("reward_rule", "reward rule", RULES, ("row", "config"), CHECKED, below="rules.")
step_aggregate = Kind("step_aggregate", "aggregate of step scores", ("algo.scores",), ("scores",))
dataset = Kind("dataset", "built-in data set", ("data.builtin",), ("number",))
row_format = Kind("row_format", "row format", (), ("row",))
group_filter = Kind("group_filter", "filter of groups", (), ("group",))
prompt_filter = Kind("prompt_filter", "filter of prompts", (), ("candidates", "generator"))
# Of teachers: a model of their own, a server, a prompt of their own, the average of the policy's weights, samples at
# temperature 1.
TEACHER = ("model", "server", "prompt", "average", "temperature")
teacher = Kind("teacher", "kind of teacher", ("rl.teachers",), ("setup",), TEACHER)
callback = Kind("callback", "callback", (), ("step", "metrics", "samples"))
# The functions of files that are named as a whole: of reward.remote_url, and of train.agent_func_path.
ROWS_OF_REWARDS, OF_PROGRAM = ("queries", "prompts", "labels"), ("task", "base_url", "api_key")
reward_file = Kind("reward_file", "reward file", (), ROWS_OF_REWARDS, by_name=("columns",), may_wait=True)
program = Kind("program", "program of an agent", (), OF_PROGRAM, may_wait=True)
tool_parser = Kind("tool_parser", "parser of tool calls", ("agents.parsing",), ("written", "tools"))

KINDS = {
    kind.name: kind
    for kind in (
        *(estimator, correction, gating, policy_loss, aggregation, preference_loss, reward_loss, divergence),
        kl_estimator,
        *(schedule, reward_rule, step_aggregate, dataset, row_format, group_filter, prompt_filter, agent, python_style),
        *(tool_parser, teacher, callback, reward_file, program),
    )
}


def describe_value(value: object) -> str:
    """Return what a value is: its type, and its shape or those of its fields."""
    name, shape = type(value).__name__, getattr(value, "shape", None)
    if shape is not None:
        return f"{name} of shape {[*shape]}"
    if is_dataclass(value):
        parts = (f"{field.name}: {describe_value(getattr(value, field.name))}" for field in fields(value))
        return f"{name} ({', '.join(parts)})"
    return name


def is_own(name: str) -> bool:
    """Return whether a name is that of a function in a file or module of the user's, not of the suite."""
    return ":" in name


def own_names(value: object) -> list[str]:
    """Return the names of functions of the user's in the value of a flag: a name, a list of names, or None."""
    names = value if isinstance(value, list) else [value]
    return [name for name in names if isinstance(name, str) and is_own(name)]


def absolute(name: str) -> str:
    """Return a name with the path in it made absolute: it is read by processes in other folders."""
    place, _, function = name.rpartition(":")
    return f"{resolve_home(place).resolve()}:{function}" if place.endswith(".py") else name


@cache
def _declarations(path: Path) -> tuple[tuple[str, Declaration], ...]:
    """Return every declaration of a module of the suite, with the name of its kind."""
    tree = ast.parse(outline(path.read_text(encoding="utf-8")), str(path))
    aliases = _aliases(tree)
    return tuple(declaration for node in functions(tree) for declaration in _read_declarations(node, path, aliases))


# The imports of this module, and what begins with a decorator, to the end of its docstring.
DECLARED = re.compile(
    r'^from rlhf_suite\.registry import (?:\([^)]*\)|[^(\n]+)$|^@.*?\n    r?""".*?"""', re.MULTILINE | re.DOTALL
)


def outline(source: str) -> str:
    """Return what declarations are read from in the source of a module, each on its line; all else is empty lines. To
    parse that takes a tenth of the time of the whole source."""
    text, end = "", 0
    for part in DECLARED.finditer(source):
        text += "\n" * source.count("\n", end, part.start()) + part[0]
        end = part.end()
    return text


def _aliases(tree: ast.Module) -> dict[str, str]:
    """Return what the module calls each decorator of this one, e.g. {"estimator": "estimator"}."""
    imports = [
        statement
        for statement in tree.body
        if isinstance(statement, ast.ImportFrom) and statement.module == f"{PACKAGE}.registry"
    ]
    return {
        name.asname or name.name: name.name for statement in imports for name in statement.names if name.name in KINDS
    }


def _read_declarations(node: FunctionDef, path: Path, aliases: dict[str, str]) -> Iterator[tuple[str, Declaration]]:
    """Yield the declarations in the decorators of a function, each with the name of its kind."""
    for decorator in node.decorator_list:
        call = decorator.func if isinstance(decorator, ast.Call) else decorator
        if isinstance(call, ast.Attribute) and isinstance(call.value, ast.Name) and call.value.id == "registry":
            name = call.attr
        else:
            name = aliases.get(call.id, "") if isinstance(call, ast.Name) else ""
        if name in KINDS:
            where = f"{path}:{decorator.lineno}"
            if not isinstance(decorator, ast.Call):
                raise SourceError(f"{where}: @{name} is not called", f"write @{name}()")
            yield name, _declaration(node, KINDS[name], decorator, path, where)


def _declaration(node: FunctionDef, kind: Kind, decorator: ast.Call, path: Path, where: str) -> Declaration:
    given: dict[str, Any] = {}
    for keyword in decorator.keywords:
        if keyword.arg not in ("name", "needs", "reads"):
            problem = f"{where}: @{kind.name} has no argument {keyword.arg or '**'}"
            raise SourceError(problem, "write name=, needs= or reads=")
        try:
            value = ast.literal_eval(keyword.value)
        except ValueError:
            problem = f"{where}: {keyword.arg}= is not written as a literal, and the file is read without being run"
            raise SourceError(problem, f'write {keyword.arg}=("<name>",)') from None
        if keyword.arg != "name" and not (isinstance(value, tuple | list) and all(isinstance(v, str) for v in value)):
            problem = f"{where}: {keyword.arg}={value!r} is not a tuple of names"
            raise SourceError(problem, f'write {keyword.arg}=("<name>",)')
        given[keyword.arg] = value
    needs = tuple(given.get("needs", kind.default_needs))
    if unknown := next((need for need in needs if not kind.may_need(need)), None):
        close = get_close_matches(unknown, kind.can_need, n=1)
        choices = ", ".join(kind.can_need)
        problem = f"{where}: needs {unknown!r}, " + (
            f"not one of {choices}" if choices else f"but a {kind.title} has no needs"
        )
        raise SourceError(problem, f"write {close[0]!r}" if close else "correct the declaration")
    return Declaration(
        *(given.get("name", node.name), node.name, summary(node), needs, tuple(given.get("reads", ()))),
        *(path, node.lineno),
    )


def _file_of(place: str, function: str, kind: Kind) -> Path | None:
    """Return the file of `place`, a .py file or a module; None for a module that is not Python source."""
    if not function.isidentifier() or not place:
        raise SourceError(f"{place}:{function} names no function", f"write {place or '<file.py>'}:<function>")
    if place.endswith(".py"):
        path = resolve_home(place).resolve()
        if not path.is_file():
            raise SourceError(f"the file {place} does not exist (seen from {Path.cwd()})", "correct the path")
        return path
    if "/" in place or not all(part.isidentifier() for part in place.split(".")):
        problem = f"{place} is neither a .py file nor the name of a module"
        raise SourceError(problem, f"write <file.py>:{function} or <package.module>:{function}")
    return module_file(place, must_exist=True)
