"""The pages of the gallery are those that its data make, and each recipe has a page."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
GALLERY = runpy.run_path(str(ROOT / "experiments" / "gallery.py"))
RECIPES = ROOT / "experiments" / "recipes"


def test_the_pages_of_the_gallery_are_fresh():
    stale = [str(path) for path, text in GALLERY["pages"]().items() if not path.exists() or path.read_text() != text]
    assert not stale, "run: python experiments/gallery.py"


def test_each_recipe_is_a_folder_with_a_page_and_the_picture_of_its_curve():
    curves = GALLERY["newest"](RECIPES / "curves.jsonl", "recipe")
    for folder in (path.parent for path in RECIPES.glob("*/recipe.yaml")):
        names = {"recipe.yaml", "README.md"} | ({"curve.png"} if folder.name in curves else set())
        assert {path.name for path in folder.iterdir()} - {"tiny.yaml"} == names
    assert set(curves) <= {path.parent.name for path in RECIPES.glob("*/recipe.yaml")}


def test_the_first_lines_of_a_recipe_are_its_description(tmp_path):
    file = tmp_path / "mine" / "recipe.yaml"
    file.parent.mkdir()
    file.write_text("# A recipe.\n# Script of OpenRLHF: train.sh\n# Note: one\n#   two: three\ntask: sft\n# not this\n")
    found = GALLERY["Recipe"].read(file)
    assert (found.name, found.what) == ("mine", "A recipe.")
    assert found.notes == {"Script of OpenRLHF": "train.sh", "Note": "one two: three"}


@pytest.mark.parametrize(("needs", "shown"), [("8 x actor: 31.4 GiB; 4 x ref: 102.0 GiB", "102.0 GiB")])
def test_the_largest_need_of_a_gpu_is_shown(needs, shown):
    assert GALLERY["largest"](needs) == shown
