"""Functions of a program or a notebook as own code of a run: a file and a name that every process can import."""

from __future__ import annotations

import ast
import builtins
import hashlib
import inspect
import linecache
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from rlhf_suite.disk import write_text
from rlhf_suite.errors import UserError

MAIN = "__main__"
DEFINITIONS = (ast.Import, ast.ImportFrom, ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)


def name_function(key: str, function: Callable[..., Any], folder: Path) -> str:
    """Return `<file.py>:<function>` for a function that is given as the value of a flag.

    A function of a module is named where it is. Of one that a script or a notebook's cell defines, the definitions
    around it are written to `folder`: to import the script itself would start its runs again.

    Raises:
        UserError: other processes could not import the function.
    """
    name = getattr(function, "__qualname__", "")
    if not inspect.isroutine(function) and not inspect.isclass(function):
        raise UserError(f"{key}: {function!r} is neither a function nor a class. Give one that has a name")
    if "<" in name or "." in name:
        kind = "a lambda" if "<lambda>" in name else "defined within a function or class"
        raise UserError(f"{key}: {name} is {kind}, and the processes of a run import functions by name. Define it with "
                        "def at the top level of a file or cell")  # fmt: skip
    source = source_file(function)
    if source is None:
        raise UserError(f"{key}: the source of {name} is not known. Define it in a file or a cell")
    if function.__module__ != MAIN:
        return f"{Path(source).resolve()}:{name}"
    text = "".join(linecache.getlines(source))
    kept = definitions(key, text)
    if missing := sorted(set(names_read(kept, name)) - set(names_defined(kept)) - {*vars(builtins)}):
        raise UserError(
            f"{key}: {name} reads {', '.join(missing)}, which {Path(source).name} does not define as an import, a "
            "function, a class or a constant at its top level. Import or define it there, or within the function"
        )
    written = ast.unparse(kept) + "\n"
    file = folder / f"{name}_{hashlib.sha256(written.encode()).hexdigest()[:12]}.py"
    folder.mkdir(parents=True, exist_ok=True)
    write_text(file, written)
    return f"{file.resolve()}:{name}"


def source_file(function: Callable[..., Any]) -> str | None:
    """Return the file of a function or class; None where it is not known. A class of a notebook's cell has the file of
    its methods: Python asks its module, which is no file."""
    parts = vars(function).values() if inspect.isclass(function) else ()
    try:
        return inspect.getsourcefile(next(filter(inspect.isfunction, parts), function))
    except (TypeError, OSError):  # of a class that is built in, or of a terminal
        return None


def definitions(key: str, text: str) -> ast.Module:
    """Return what a script or cell defines at its top level: imports, functions, classes and constants."""
    try:
        module = ast.parse(text)
    except SyntaxError as error:  # a cell with a line of IPython's own, such as %time
        raise UserError(f"{key}: line {error.lineno} of the cell is not Python. Put the function into a cell of its own") from None  # fmt: skip  # noqa: E501
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


def names_read(module: ast.Module, name: str) -> Iterator[str]:
    """Yield the global names that the code of a function reads, and those of the functions that it is made of."""
    code = compile(module, "<definitions>", "exec")
    waiting = [constant for constant in code.co_consts if inspect.iscode(constant) and constant.co_name == name]
    while waiting:
        one = waiting.pop()
        waiting += [constant for constant in one.co_consts if inspect.iscode(constant)]
        yield from global_names(one)


def global_names(code: Any) -> Iterator[str]:
    """Yield the names that one code object reads as globals."""
    import dis

    yield from (str(step.argval) for step in dis.get_instructions(code) if step.opname in ("LOAD_GLOBAL", "LOAD_NAME"))
