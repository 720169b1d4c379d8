"""docs/versions.md has the ranges of pyproject.toml and the versions of both files of constraints."""

from __future__ import annotations

import ast
import re
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "versions.md").read_text()
ROW = re.compile(r"^\| `([\w-]+)` \| `([^`]+)` \| ([\d.]+) \| ([\d.]+) \|", re.MULTILINE)


def pinned(name: str) -> dict[str, str]:
    """The versions in a file of constraints."""
    lines = (ROOT / f"constraints-{name}.txt").read_text().splitlines()
    return dict(line.split("==") for line in lines if "==" in line)


def tried() -> list[str]:
    """The packages that `nox -s newest` upgrades."""
    tree = ast.parse((ROOT / "noxfile.py").read_text())
    (values,) = [
        node.value for node in tree.body if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "NEWEST"
    ]
    return list(ast.literal_eval(values))


def test_the_page_has_the_range_and_the_versions_of_each_package_that_is_tried():
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    ranges = {found[1]: found[2] for found in (re.match(r"([\w-]+)(?:\[.*\])?(.*)", each) for each in declared)}
    tested, newest = pinned("cpu"), pinned("newest")
    expected = [(name, ranges[name], tested[name], newest[name]) for name in tried()]
    assert ROW.findall(PAGE) == expected
