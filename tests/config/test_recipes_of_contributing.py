"""The recipes of CONTRIBUTING.md, followed in a copy of the sources: their blocks are written, their commands run."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

pytestmark = pytest.mark.stack

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "CONTRIBUTING.md").read_text().partition("## Add to it")[2].partition("## Glossary")[0]
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
PLACE = re.compile(r"# (?P<file>\S+?)(?:, (?P<where>below|in place of) `(?P<line>.*)`)?\n")
RECIPES = ["A flag", "An advantage estimator", "A supervised task", "A preset", "A conversion of migrate"]
SAID = {
    "A flag": "Seconds to wait before each optimiser step",
    "An advantage estimator": "estimator: best_of_group",
    "A supervised task": "",
    "A preset": "max_new_tokens: 32",
    "A conversion of migrate": "train.pause_s=2",
}


def blocks(recipe: str) -> Iterator[tuple[str, str]]:
    """Yield the language and the text of each block of a recipe."""
    text = PAGE.partition(f"### {recipe}\n")[2].partition("\n### ")[0]
    for match in BLOCK.finditer(text):
        yield match[1], match[2]


def write(folder: Path, text: str) -> None:
    """Add a block to the file that its first line names."""
    place = PLACE.match(text)
    assert place is not None, text
    file, added = folder / place["file"], text[place.end() :]
    before = file.read_text() if file.exists() else ""
    if place["line"]:
        assert before.count(f"{place['line']}\n") == 1, f"{place['line']} stands not once in {file}"
        kept = f"{place['line']}\n" if place["where"] == "below" else ""
        after = before.replace(f"{place['line']}\n", kept + added)
    else:
        after = before + added
    file.write_text(after)


@pytest.fixture(scope="module")
def copy(tmp_path_factory):
    """A copy of the sources in which every recipe is followed."""
    folder = tmp_path_factory.mktemp("recipes")
    for name in ("src", "conf"):
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    for recipe in RECIPES:
        for language, text in blocks(recipe):
            if language != "bash":
                write(folder, text)
    return folder


def test_every_recipe_is_followed():
    assert re.findall(r"^### (.*)$", PAGE, re.MULTILINE) == RECIPES


def count_touched(recipe: str) -> tuple[int, int]:
    """The files that the blocks of a recipe touch, and the lines with a text that they add or change."""
    written = [PLACE.match(text) for language, text in blocks(recipe) if language != "bash"]
    assert None not in written, recipe
    added = [match.string[match.end() :].splitlines() for match in written]
    return len({match["file"] for match in written}), sum(line != "" for lines in added for line in lines)


def test_the_table_says_what_each_recipe_touches():
    table = re.findall(r"^\| (.*?) \| (\d+) \| (\d+) \|$", PAGE, re.MULTILINE)
    assert [(name, (int(files), int(lines))) for name, files, lines in table] == [
        (name, count_touched(name)) for name in RECIPES
    ]


@pytest.mark.parametrize("recipe", RECIPES)
def test_the_commands_of_a_recipe_run(copy, recipe):
    environment = os.environ | {"PYTHONPATH": str(copy / "src")}
    (commands,) = [text for language, text in blocks(recipe) if language == "bash"]
    script = commands.replace("python -m", f"{sys.executable} -m").replace(f"'{sys.executable} -m", "'python -m")
    done = subprocess.run(
        ["bash", "-ec", script], cwd=copy, env=environment, capture_output=True, text=True, check=False, timeout=600
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert SAID[recipe] in " ".join(done.stdout.split())
