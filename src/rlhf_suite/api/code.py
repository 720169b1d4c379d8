"""Functions of a program or a notebook as own code of a run: a file and a name that every process can import."""

from __future__ import annotations

import ast
import builtins
import hashlib
import inspect
import linecache
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import CodeType, NoneType
from typing import Any

from rlhf_suite.config.check.problems import ConfigurationError
from rlhf_suite.disk import write_text

MAIN = "__main__"
SIMPLE = (bool, int, float, str, NoneType)  # values of another cell that are written as they are
DEFINITIONS = (ast.Import, ast.ImportFrom, ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)


def name_function(key: str, function: Callable[..., Any], folder: Path) -> str:
    """Return `<file.py>:<function>` for a function that is given as the value of a flag.

    A function of a module is named where it is. Of one that a script or a notebook's cell defines, the definitions
    around it, and what these need of other cells, are written to `folder`: to import the script itself would start
    its runs again.

    Raises:
        ConfigurationError: other processes could not import the function.
    """
    name = getattr(function, "__qualname__", "")
    if problem := why_unnamed(function, name):
        raise ConfigurationError.of(key, *problem)
    source = source_file(function)
    if source is None:
        raise ConfigurationError.of(key, f"the source of {name} is not known", "define it in a file or a cell")
    if function.__module__ != MAIN:
        return f"{Path(source).resolve()}:{name}"
    kept = definitions(key, source)
    if missing := complete(key, kept, function):
        reason = (
            f"{name} needs {', '.join(missing)}, and no import, function, class or constant at the top level of "
            f"{Path(source).name} or of another cell is called so"
        )
        raise ConfigurationError.of(key, reason, "import or define it there, or within the function")
    written = ast.unparse(kept) + "\n"
    file = folder / f"{name}_{hashlib.sha256(written.encode()).hexdigest()[:12]}.py"
    folder.mkdir(parents=True, exist_ok=True)
    write_text(file, written)
    return f"{file.resolve()}:{name}"


def why_unnamed(function: Any, name: str) -> tuple[str, str] | None:
    """Return why the processes of a run cannot import something by its name, and the remedy; None if they can."""
    kind = type(function).__name__
    if inspect.ismethod(function):
        return (
            f"{name} is a method of an object, which stays in this process",
            "define a function for it",
        )
    if not inspect.isroutine(function) and not inspect.isclass(function):
        reason = (
            f"an object of type {kind} is neither a function nor a class, and the processes of a run import by name"
        )
        return reason, "define a function that calls it" if callable(function) else f"give the class {kind}"
    if "<" in name or "." in name:
        where = "a lambda" if "<lambda>" in name else "defined within a function or class"
        problem = f"{name} is {where}, and the processes of a run import functions by name"
        return problem, "define it with def at the top level of a file or cell"
    return None


def source_file(function: Callable[..., Any]) -> str | None:
    """Return the file of a function or class; None where it is not known. For a class of a
    notebook's cell this is the file of its methods, because its module has no file."""
    parts = vars(function).values() if inspect.isclass(function) else ()
    try:
        return inspect.getsourcefile(next(filter(inspect.isfunction, parts), function))
    except (TypeError, OSError):  # of a class that is built in, or of a terminal
        return None


def complete(key: str, kept: ast.Module, function: Callable[..., Any]) -> list[str]:
    """Add to the definitions of a cell what a function or class of it needs of other cells; return the names that are
    missing then."""
    name = function.__name__
    parts = [function, *(vars(function).values() if inspect.isclass(function) else ())]
    space = next((part.__globals__ for part in parts if inspect.isfunction(part)), vars(sys.modules[MAIN]))
    while missing := sorted(names_needed(kept, name) - {*names_defined(kept)} - {*vars(builtins)}):
        added = [statement for one in missing if one in space for statement in statements_of(key, one, space[one])]
        if not added:
            break
        kept.body = sorted([*added, *kept.body], key=lambda statement: not is_future(statement))
    return missing


def statements_of(key: str, name: str, value: Any) -> list[ast.stmt]:
    """Return what gives a name of another cell its value: an import, the definitions of that cell, or a constant. None
    if it is something else."""
    if inspect.ismodule(value):
        return ast.parse(f"import {value.__name__} as {name}").body
    if not inspect.isroutine(value) and not inspect.isclass(value):
        assignments = ast.parse(f"{name} = {value!r}").body if isinstance(value, SIMPLE) else []
        return [*filter(is_constant, assignments)]  # nan is none
    if value.__module__ != MAIN:
        is_there = getattr(sys.modules.get(value.__module__ or ""), value.__name__, None) is value
        return ast.parse(f"from {value.__module__} import {value.__name__} as {name}").body if is_there else []
    source = source_file(value)
    module = ast.Module([], []) if source is None else definitions(key, source)
    return module.body if name in names_defined(module) else []


def is_future(statement: ast.stmt) -> bool:
    """Return whether a statement has to be the first one of its file."""
    return isinstance(statement, ast.ImportFrom) and statement.module == "__future__"


def definitions(key: str, source: str) -> ast.Module:
    """Return what a script or cell defines at its top level: imports, functions, classes and constants."""
    try:
        module = ast.parse("".join(linecache.getlines(source)))
    except SyntaxError as error:  # a cell with a line of IPython's own, such as %time
        problem, fix = f"line {error.lineno} of the cell is not Python", "put the function into a cell of its own"
        raise ConfigurationError.of(key, problem, fix) from None
    module.body = [
        statement for statement in module.body if isinstance(statement, DEFINITIONS) or is_constant(statement)
    ]
    return module


def is_constant(statement: ast.stmt) -> bool:
    """Return whether a statement gives a name a constant value."""
    if not isinstance(statement, ast.Assign | ast.AnnAssign) or statement.value is None:
        return False
    try:
        ast.literal_eval(statement.value)
    except ValueError:
        return False
    return True


def names_defined(module: ast.Module) -> Iterator[str]:
    """Yield the names that the statements of a module define."""
    for statement in module.body:
        if isinstance(statement, ast.Import | ast.ImportFrom):
            yield from ((alias.asname or alias.name).partition(".")[0] for alias in statement.names)
        elif isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield statement.name
        elif isinstance(statement, ast.Assign):
            yield from (
                name.id for target in statement.targets for name in ast.walk(target) if isinstance(name, ast.Name)
            )
        elif isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
            yield statement.target.id


def names_needed(module: ast.Module, name: str) -> set[str]:
    """Return the global names that are read when the module is imported, by a function or class of it, and by those of
    its functions and classes that these use."""
    code = compile(ast.unparse(module), "<definitions>", "exec", dont_inherit=True)
    blocks = {block.co_name: block for block in code.co_consts if inspect.iscode(block)}
    needed, waiting = set[str](), [name, *names_with("LOAD_", code)]  # such as the base of a class
    while waiting:
        needed.add(one := waiting.pop())
        for block in code_within(blocks.pop(one)) if one in blocks else ():
            waiting += names_with("LOAD_", block) - names_with("STORE_", block)  # a class stores its own
    return needed - {name}


def code_within(code: CodeType) -> Iterator[CodeType]:
    """Yield the code of a function or class, and of those that are defined in it."""
    yield code
    for constant in code.co_consts:
        if inspect.iscode(constant):
            yield from code_within(constant)


def names_with(kind: str, code: CodeType) -> set[str]:
    """Return the names that one code object loads ("LOAD_") or stores ("STORE_") by name: globals, and those of a
    class."""
    import dis

    steps = dis.get_instructions(code)
    return {str(step.argval) for step in steps if step.opname in (f"{kind}GLOBAL", f"{kind}NAME")}
