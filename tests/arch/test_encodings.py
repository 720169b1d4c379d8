"""Text files have the same encoding in every locale. The linter (PLW1514) sees calls of `open`, and those on a path
that is made in the same place. This test sees the others."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

PACKAGE = Path(__file__).parents[2] / "src" / "rlhf_suite"
METHODS = ("read_text", "write_text")  # of `pathlib.Path`


def find_calls_without_encoding(tree: ast.AST) -> Iterator[int]:
    """Yield the lines of the calls that read or write in the encoding of the locale."""
    for node in ast.walk(tree):
        is_call = isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in METHODS
        if is_call and "encoding" not in {keyword.arg for keyword in node.keywords}:
            yield node.lineno


def test_text_files_are_read_and_written_with_an_encoding():
    found = {
        f"{path.relative_to(PACKAGE)}:{line}"
        for path in PACKAGE.rglob("*.py")
        for line in find_calls_without_encoding(ast.parse(path.read_text(encoding="utf-8")))
    }
    assert found == set()


def test_a_call_without_an_encoding_is_found():
    text = 'path.read_text()\npath.write_text("a", encoding="utf-8")\nwrite_text(path, "a")\npath.write_text("b")\n'
    assert [*find_calls_without_encoding(ast.parse(text))] == [1, 4]
