"""Functions are named by verbs, and variables by what they hold."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

SOURCE = Path(__file__).parents[2] / "src" / "rlhf_suite"
EMPTY = {"found", "each", "what"}  # names that say nothing of the value
# Participles that do not end in -ed, and words in -ed that are verbs.
IRREGULAR = {"begun", "built", "chosen", "drawn", "found", "given", "gone", "held", "hidden", "kept", "known", "left"}
IRREGULAR |= {
    "lost",
    "made",
    "meant",
    "met",
    "said",
    "seen",
    "sent",
    "shown",
    "spelt",
    "spent",
    "taken",
    "told",
    "written",
}
VERBS = {"bleed", "breed", "embed", "exceed", "feed", "need", "proceed", "seed", "shed", "speed", "succeed"}
# Fields of records that are written as JSON, and of problems, which have a key, a what and a fix.
FIELDS = {"config/check/problems.py", "tracking/timeline.py", "waits.py"}

LATER = {"rl/slots.py"}  # its functions are transitions: what has happened to a group


def files() -> Iterator[tuple[str, ast.Module]]:
    for file in sorted(SOURCE.rglob("*.py")):
        name = str(file.relative_to(SOURCE))
        if name not in LATER:
            yield name, ast.parse(file.read_text())


def is_property(node: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    return any("property" in ast.unparse(decorator) for decorator in node.decorator_list)


def is_participle(word: str) -> bool:
    return word in IRREGULAR or (word.endswith("ed") and "_" not in word and word not in VERBS)


def participles(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Yield the line and name of each function whose whole name is a participle. Those of properties are states."""
    for node in ast.walk(tree):
        is_function = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        if is_function and not is_property(node) and is_participle(node.name.strip("_")):
            yield node.lineno, node.name


def empty_names(tree: ast.Module, may_be_field: bool = False) -> Iterator[tuple[int, str]]:
    """Yield the line and name of each variable and parameter of `EMPTY`."""
    fields = {node.target for node in ast.walk(tree) if isinstance(node, ast.AnnAssign)} if may_be_field else set()
    for node in ast.walk(tree):
        if isinstance(node, ast.arg) and node.arg in EMPTY:
            yield node.lineno, node.arg
        is_variable = isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store) and node not in fields
        if is_variable and node.id in EMPTY:
            yield node.lineno, node.id


def test_no_function_is_named_by_a_participle():
    assert [f"{name}:{line}: {word}" for name, tree in files() for line, word in participles(tree)] == []


def test_no_variable_has_a_name_that_says_nothing():
    found = [(name, line, word) for name, tree in files() for line, word in empty_names(tree, name in FIELDS)]
    assert found == []


def test_such_names_are_noticed():
    tree = ast.parse("def measured(what):\n    for each in what:\n        found = each\n\ndef seed(): ...\n")
    assert [*participles(tree)] == [(1, "measured")]
    assert sorted(empty_names(tree)) == [(1, "what"), (2, "each"), (3, "found")]
