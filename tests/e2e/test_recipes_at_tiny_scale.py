"""Each recipe of experiments/recipes trains two steps with tiny models, so that no recipe can go stale."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "experiments" / "recipes"))

from plan import RECIPES, name_of
from tiny import try_recipe

pytestmark = pytest.mark.proof


@pytest.mark.parametrize("recipe", RECIPES, ids=name_of)
def test_a_recipe_runs_at_tiny_scale(recipe, tmp_path):
    if "load_in_4bit" in recipe.read_text():
        pytest.importorskip("bitsandbytes")
    code, _, text = try_recipe(recipe, tmp_path)
    assert code == 0, text
    assert (tmp_path / name_of(recipe) / "status.json").exists()
