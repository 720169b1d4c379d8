"""Python files: read without being run, found without being imported, and imported where they are needed."""

from __future__ import annotations

import ast
import hashlib
import importlib
import importlib.util
import inspect
import site
import sys
import sysconfig
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from functools import cache, lru_cache
from importlib.machinery import PathFinder
from pathlib import Path
from types import ModuleType
from typing import Any

from rlhf_suite.errors import FixableError
from rlhf_suite.foreign_text import line_of_user, printable, what_of

SOURCE = Path(__file__).parent
FunctionDef = ast.FunctionDef | ast.AsyncFunctionDef
MOST_FILES = 1000  # of a user's own that are followed from one; a project has fewer
GUARD, LOCKS = threading.Lock(), dict[str, threading.RLock]()  # a lock for each file that is imported


class SourceError(FixableError):
    """A name does not lead to a function of its kind."""


def parse_file(path: Path) -> ast.Module:
    """Return the syntax tree of a Python file, read again when the file has changed.

    Raises:
        SourceError: it cannot be read, or is not Python.
    """
    try:
        status = path.stat()
        return _parse_file(path, status.st_mtime_ns, status.st_size)
    except (SyntaxError, ValueError) as error:  # a ValueError for a null byte, in Python 3.11
        line, reason = (error.lineno or 1, error.msg) if isinstance(error, SyntaxError) else (1, str(error))
        raise SourceError(f"{path}:{line}: {reason}", "correct the file; it must be valid Python") from None
    except RecursionError:
        raise SourceError(f"{path} is nested too deeply to be read as Python", "correct the file") from None
    except OSError as error:
        raise SourceError(f"{path} cannot be read: {error.strerror}", "check its permissions") from None


@lru_cache(maxsize=64)
def _parse_file(path: Path, changed: int, size: int) -> ast.Module:
    with warnings.catch_warnings(action="ignore"):
        tree = ast.parse(path.read_bytes(), str(path))
        if SOURCE not in path.parents:
            compile(tree, str(path), "exec", dont_inherit=True)  # finds more: a return outside of a function
    return tree


def bindings(statement: ast.AST) -> Iterator[str]:
    """Yield the names that a statement of a module may bind; `*` for all names of another module."""
    if isinstance(statement, FunctionDef | ast.ClassDef):
        yield statement.name
    elif isinstance(statement, ast.Import | ast.ImportFrom):
        yield from (name.asname or name.name for name in statement.names)
    elif isinstance(statement, ast.Name) and isinstance(statement.ctx, ast.Store):
        yield statement.id
    else:
        for child in ast.iter_child_nodes(statement):
            yield from bindings(child)


def list_bound_names(tree: ast.Module) -> set[str]:
    return {name for statement in tree.body for name in bindings(statement)}


def functions(tree: ast.Module) -> list[FunctionDef]:
    return [node for node in tree.body if isinstance(node, FunctionDef)]


def summary(node: FunctionDef) -> str:
    """Return the first sentence of a docstring, without its full stop."""
    text = ast.get_docstring(node) or ""
    return " ".join(text.partition("\n\n")[0].split()).rstrip(".:")


def signature(function: str, parameters: Sequence[str]) -> str:
    """Return how a function with these parameters begins."""
    return f"def {function}({', '.join(parameters)})"


def check_parameters(node: FunctionDef, path: Path, parameters: Sequence[str], by_name: Sequence[str] = ()) -> None:
    """Check that a function of the user's, which is read and not run, can be called with these parameters by position.
    Those of `by_name` it may have besides: it gets them by name.

    Raises:
        SourceError: it takes more or fewer arguments.
    """
    positional = [argument.arg for argument in (*node.args.posonlyargs, *node.args.args)]
    needed = positional[: len(positional) - len(node.args.defaults)]
    named = zip(node.args.kwonlyargs, node.args.kw_defaults, strict=True)
    only_named = [argument.arg for argument, default in named if default is None and argument.arg not in by_name]
    most, least = (len([name for name in names if name not in by_name]) for names in (positional, needed))
    wanted = len(parameters)
    if least > wanted or (wanted > most and node.args.vararg is None) or only_named:
        count = (least if least > wanted else most) + len(only_named)
        problem = f"{path}:{node.lineno}: {node.name} takes {count} arguments, not {wanted}"
        raise SourceError(problem, f"write {signature(node.name, parameters)}")


def why_not_called(function: Callable[..., Any], *arguments: object, **named: object) -> str | None:
    """Return why a function or class of the user's, which has been imported, cannot be called with these arguments;
    None if it can, or that is not known."""
    try:
        inspect.signature(function).bind(*arguments, **named)
    except TypeError as error:
        return str(error)
    except ValueError:  # compiled
        return None
    return None


def module_file(module: str, must_exist: bool = False) -> Path | None:
    """Return the file of a module, found without importing the packages that it is in."""
    folders: list[str] | None = None
    spec = None
    importlib.invalidate_caches()
    for depth, _ in enumerate(parts := module.split("."), start=1):
        spec = PathFinder.find_spec(".".join(parts[:depth]), folders)
        if spec is None:
            if must_exist:
                problem = f"there is no module {'.'.join(parts[:depth])}"
                raise SourceError(problem, "install its package, put its folder on PYTHONPATH, or name the .py file")
            return None
        folders = list(spec.submodule_search_locations or [])
    origin = spec.origin if spec is not None else None
    return Path(origin) if origin is not None and origin.endswith(".py") else None


def own_files(path: Path) -> list[Path]:
    """Return a user's file and those that it imports, in any depth: its neighbours, and what else is on the path of
    Python. Installed packages, the standard library and the suite itself are not among them."""
    importlib.invalidate_caches()
    folders = [str(path.parent), *sys.path]
    files, left = dict[Path, None](), [path.resolve()]
    while left and len(files) < MOST_FILES:
        file = left.pop(0)
        if file not in files:
            files[file] = None
            left += list_imports(file, folders)
    return list(files)


def list_imports(file: Path, folders: list[str]) -> Iterator[Path]:
    """Yield the user's own files among those that a file imports, wherever in it; none of one that is not Python."""
    try:
        tree = parse_file(file)
    except SourceError:
        return
    for node in ast.walk(tree):
        names, level = imports_of(node)
        for name in names:
            yield from files_of_module(name, [str(file.parents[level - 1])] if level else folders)


def imports_of(node: ast.AST) -> tuple[list[str], int]:
    """Return the modules that a statement or a call may import, and how many packages up their names begin."""
    if isinstance(node, ast.Import):
        return [name.name for name in node.names], 0
    if isinstance(node, ast.ImportFrom):
        begin = f"{node.module}." if node.module else ""
        return [f"{begin}{name.name}" for name in node.names], node.level
    if isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant):
        called = getattr(node.func, "attr", getattr(node.func, "id", ""))
        value = node.args[0].value
        if called in ("import_module", "__import__") and isinstance(value, str):
            return [value], 0
    return [], 0


def files_of_module(name: str, folders: list[str]) -> Iterator[Path]:
    """Yield the user's own files that an import of a module runs: those of its packages, and its own. The end of the
    name may be that of something in a module."""
    within: list[str] = folders
    for part in name.split("."):
        spec = PathFinder.find_spec(part, within)
        if spec is None:
            return
        origin = Path(spec.origin).resolve() if spec.origin is not None and spec.has_location else None
        if origin is not None and is_installed(origin):
            return
        if origin is not None:
            yield origin
        within = list(spec.submodule_search_locations or [])


def is_installed(file: Path) -> bool:
    """Return whether a file is one of an installed package, of Python, or of the suite."""
    return any(folder in file.parents for folder in list_installed_folders())


@cache
def list_installed_folders() -> frozenset[Path]:
    """Return the folders of what is installed."""
    names = ("stdlib", "platstdlib", "purelib", "platlib")
    folders = [*map(sysconfig.get_path, names), *site.getsitepackages(), site.getusersitepackages()]
    return frozenset({*(Path(folder).resolve() for folder in folders), SOURCE.resolve()})


def import_file(path: Path) -> ModuleType:
    """Import a file once per process; threads that want it meanwhile wait until it is whole. It may import its
    neighbours."""
    name = f"own_code_{hashlib.sha256(str(path).encode()).hexdigest()[:12]}"
    with GUARD:
        lock = LOCKS.setdefault(name, threading.RLock())
    with lock:
        return sys.modules[name] if name in sys.modules else _import_file(name, path)


def check_neighbours(path: Path) -> None:
    """Raise SourceError if a file would get another module than the neighbour that it imports: one of that name which
    a file in another folder has brought."""
    for file in list_imports(path, [str(path.parent)]):
        module = file.parent if file.name == "__init__.py" else file
        loaded = getattr(sys.modules.get(module.stem), "__file__", None) if module.parent == path.parent else None
        other = file if loaded is None else Path(loaded).resolve()
        if other != file and not is_installed(other) and other.is_file() and other.read_bytes() != file.read_bytes():
            problem = f"{path} imports {file}, but {other} has been imported as {module.stem} before"
            raise SourceError(problem, "rename one of the two files: a process has one module of a name")


def _import_file(name: str, path: Path) -> ModuleType:
    """Import the file of a module that has this name."""
    check_neighbours(path)
    if str(path.parent) not in sys.path:
        sys.path.insert(0, str(path.parent))
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None, path
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses and pickle look their module up
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def import_failure(name: str, error: BaseException) -> SourceError:
    """Return what to say of a user's file or function, called `name`, that cannot be imported."""
    where, fix = line_of_user(error), "correct it"
    if isinstance(error, ModuleNotFoundError):
        fix = f"install {error.name} in the environment of the run, or put its folder on PYTHONPATH"
    elif isinstance(error, SystemExit):
        fix = 'a file that is imported must not end the process: put that below if __name__ == "__main__":'
    problem = f"{name}: importing it raised {printable(what_of(error), keep_lines=True)}"
    return SourceError(problem + (f" ({where})" if where else ""), fix)


def digests(name: str) -> list[str]:
    """Return the file of a user's own function and those of the user's own that it imports, each with its SHA-256, as
    texts."""
    place = name.rpartition(":")[0]
    path = Path(place) if place.endswith(".py") else module_file(place)
    if path is None or not path.is_file():
        return [f"{path or place} (no file)"]
    others = [file for file in own_files(path) if file != path.resolve()]
    return [digest(other) for other in (path, *others)]


def digest(file: Path) -> str:
    """Return a file with its SHA-256, as text."""
    try:
        return f"{file} sha256:{hashlib.sha256(file.read_bytes()).hexdigest()}"
    except OSError as error:
        return f"{file} ({error.strerror})"
