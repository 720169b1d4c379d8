"""Nobody asks for the name of an algorithm: what it needs and reads is in its declaration."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

from rlhf_suite.config.declarations.flags import walk
from rlhf_suite.config.declarations.runs import TASKS, Run
from rlhf_suite.registry import KINDS

SOURCE = Path(__file__).parents[2] / "src" / "rlhf_suite"
WORDS: dict[str, set[str]] = {}  # by the last word of a flag that names an algorithm: the names that it may have
for info in (info for task in TASKS for info in walk(Run.of(task))):
    if info.meta.algorithms is not None:
        WORDS.setdefault(info.key.rpartition(".")[2], set()).update(info.meta.algorithms.names())


def words(node: ast.AST) -> set[str]:
    """Return the names in an expression, such as {"config", "kind"} of `config.kind`, with those of plurals."""
    found = {each.attr for each in ast.walk(node) if isinstance(each, ast.Attribute)}
    found |= {each.id for each in ast.walk(node) if isinstance(each, ast.Name)}
    return found | {each.removesuffix("s") for each in found}


def texts(node: ast.AST) -> set[str]:
    return {each.value for each in ast.walk(node) if isinstance(each, ast.Constant) and isinstance(each.value, str)}


def comparisons(tree: ast.AST) -> Iterator[tuple[int, set[str]]]:
    """Yield the line of each comparison of a flag of `WORDS` with one of its names, and these names."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Compare):
            sides = (node.left, *node.comparators)
        elif isinstance(node, ast.Call) and getattr(node.func, "id", "") in ("is_one_of", "is_not"):
            sides = tuple(node.args)
        else:
            continue
        asked = set[str]().union(*map(words, sides)) | {
            text.rpartition(".")[2] for text in set().union(*map(texts, sides))
        }
        for word in asked & set(WORDS):
            if names := WORDS[word] & set[str]().union(*map(texts, sides)):
                yield node.lineno, names


def test_no_comparison_asks_for_the_name_of_an_algorithm():
    found = [
        f"{file.relative_to(SOURCE)}:{line}: {sorted(names)}"
        for file in sorted(SOURCE.rglob("*.py"))
        if "migrate" not in file.parts  # it translates the names of OpenRLHF
        for line, names in comparisons(ast.parse(file.read_text()))
    ]
    assert found == []


def test_a_comparison_with_a_kind_of_agent_is_found():
    for text in ('config.kind == "endpoint"', 'agent.kind in ("tools", "python")', 'is_one_of(".kind", "python")'):
        assert [*comparisons(ast.parse(text))], text
    assert {*KINDS["agent"].names()} == {"single_turn", "tools", "environment", "python", "endpoint"}
    assert WORDS["kind"] == {*KINDS["agent"].names(), *KINDS["teacher"].names()}
