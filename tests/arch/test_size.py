"""Nothing grows beyond what one reads at a sitting: files of 300 lines, functions of 50."""

from __future__ import annotations

import ast
from pathlib import Path

import rlhf_suite

SOURCE = Path(rlhf_suite.__file__).parent
FILES = [*SOURCE.rglob("*.py"), *(SOURCE.parent / "hydra_plugins").rglob("*.py")]
MAX_FILE, MAX_FUNCTION = 300, 50
# Path (and function) -> why it may be longer.
LONGER: dict[str, str] = {}


def name(path: Path) -> str:
    return str(path.relative_to(SOURCE.parent))


def long_files() -> set[str]:
    return {name(path) for path in FILES if len(path.read_text().splitlines()) > MAX_FILE}


def long_functions() -> set[str]:
    return {
        f"{name(path)}:{node.name}"
        for path in FILES
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.end_lineno - node.lineno >= MAX_FUNCTION
    }


def test_files_and_functions_stay_short():
    assert long_files() | long_functions() == set(LONGER)


def test_what_may_be_longer_has_a_reason():
    assert all(LONGER.values())


def test_every_file_says_what_it_is_for():
    texts = {name(path): path.read_text() for path in FILES}
    assert [path for path, text in texts.items() if text and not ast.get_docstring(ast.parse(text))] == []
