"""Modules hold one subject: not more than one reads at a sitting, and not a few lines that serve one caller."""

from __future__ import annotations

import ast
from collections import defaultdict
from functools import cache
from pathlib import Path

import rlhf_suite

SOURCE = Path(rlhf_suite.__file__).parent
FILES = [*SOURCE.rglob("*.py")]
MAX_FILE, MAX_FUNCTION = 400, 50  # lines
MEDIAN_FILE = 150
MIN_SHARED = 40  # a shorter module with one importer belongs into that importer
# Path (and function) -> why it may be longer.
LONGER: dict[str, str] = {}
# Found by their names, not by imports: tasks, commands, what `python -m` starts, and what vLLM loads in its workers.
STARTED = (
    *("rlhf_suite/tasks/", "rlhf_suite/engines/worker.py"),
    *(f"rlhf_suite/cli/{name}.py" for name in ("__main__", "child")),
)
# Short modules with one importer, to go back to it. This list only shrinks.
SHORT: set[str] = set()


def name(path: Path) -> str:
    return str(path.relative_to(SOURCE.parent))


@cache
def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def num_lines(path: Path) -> int:
    return len(path.read_text().splitlines())


def long_files() -> set[str]:
    return {name(path) for path in FILES if num_lines(path) > MAX_FILE}


def long_functions() -> set[str]:
    return {
        f"{name(path)}:{node.name}"
        for path in FILES
        for node in ast.walk(tree(path))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.end_lineno - node.lineno >= MAX_FUNCTION
    }


def importers() -> dict[str, set[str]]:
    """Return which files import a name: a module, or something in a module, with its dotted path."""
    found: dict[str, set[str]] = defaultdict(set)
    for path in FILES:
        for node in ast.walk(tree(path)):
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and node.module:
                names = [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
            else:
                continue
            for imported in names:
                found[imported].add(name(path))
    return found


def short_modules_with_one_importer() -> set[str]:
    known = importers()
    modules = {path: ".".join(path.relative_to(SOURCE.parent).with_suffix("").parts) for path in FILES}
    return {
        name(path)
        for path, module in modules.items()
        if path.name != "__init__.py" and not name(path).startswith(STARTED)
        if num_lines(path) < MIN_SHARED and len(known[module]) <= 1
    }


def test_files_and_functions_stay_short():
    assert long_files() | long_functions() == set(LONGER)
    assert sorted(map(num_lines, FILES))[len(FILES) // 2] <= MEDIAN_FILE


def test_what_may_be_longer_has_a_reason():
    assert all(LONGER.values())


def test_a_short_module_has_more_than_one_importer():
    assert short_modules_with_one_importer() - SHORT == set(), "move it into its importer"


def test_every_file_says_what_it_is_for():
    assert [name(path) for path in FILES if path.stat().st_size and not ast.get_docstring(tree(path))] == []
