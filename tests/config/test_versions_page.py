"""docs/versions.md has the ranges of pyproject.toml and the versions of the files of constraints."""

from __future__ import annotations

import ast
import re
import tomllib
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "versions.md").read_text()
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
ROW = re.compile(r"^\| `([\w-]+)` \| `([^`]+)` \| ([\d.]+) \| ([\d.]+) \| ([\d.]+) \|", re.MULTILINE)


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
    declared = (re.match(r"([\w-]+)(?:\[.*\])?(.*)", each) for each in PROJECT["dependencies"])
    ranges = {found[1]: found[2] for found in declared}
    oldest, tested, newest = pinned("oldest"), pinned("cpu"), pinned("newest")
    expected = [(name, ranges[name], oldest[name], tested[name], newest[name]) for name in tried()]
    assert ROW.findall(PAGE) == expected


def test_each_range_begins_with_the_oldest_version_that_is_tried():
    """A range that begins below what the others of its packages need would promise versions that no one can install."""
    oldest = {canonicalize_name(name): Version(version) for name, version in pinned("oldest").items()}
    wrong = []
    for each in [*PROJECT["dependencies"], *PROJECT["optional-dependencies"]["dev"]]:
        requirement = Requirement(each)
        begins = [Version(part.version) for part in requirement.specifier if part.operator == ">="]
        if begins and begins != [oldest.get(requirement.name)]:
            wrong.append((each, oldest.get(requirement.name)))
    assert not wrong
