"""Each recipe of experiments/recipes trains two steps with tiny models, so that no recipe can go stale."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "experiments" / "recipes"))

from plan import RECIPES, name_of
from tiny import SCORER, try_recipe

pytestmark = pytest.mark.proof


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """The folder of all runs, with the reward model that scores in some of them."""
    folder = tmp_path_factory.mktemp("recipes")
    code, _, text = try_recipe(next(recipe for recipe in RECIPES if name_of(recipe) == SCORER), folder)
    assert code == 0, text
    return folder


@pytest.mark.parametrize("recipe", RECIPES, ids=name_of)
def test_a_recipe_runs_at_tiny_scale(recipe, folder):
    if "load_in_4bit" in recipe.read_text():
        pytest.importorskip("bitsandbytes")
    if name_of(recipe) != SCORER:
        code, _, text = try_recipe(recipe, folder)
        assert code == 0, text
    assert (folder / name_of(recipe) / "status.json").exists()
