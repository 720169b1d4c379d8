"""Each recipe of experiments/recipes is a run that passes all checks, with small models in the place of large ones."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from rlhf_suite.composition.arguments import parse
from rlhf_suite.composition.config_file import with_config_file
from rlhf_suite.config.declarations.flags import all_values
from rlhf_suite.preflight.jobs import preflight

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "experiments" / "recipes"))

from plan import PLANS, RECIPES, SHAPES, is_planned, name_of, run_of, stand_ins  # noqa: E402
from tiny import words_of  # noqa: E402


def tiny(name):
    assert name in SHAPES, f"{name} has no shape to plan with"
    return "builtin:tiny"


@pytest.mark.parametrize("recipe", RECIPES, ids=name_of)
def test_a_recipe_passes_all_checks_with_a_small_model(recipe):
    if "load_in_4bit" in recipe.read_text():
        pytest.importorskip("bitsandbytes")
    assert run_of(recipe, tiny).actor.model_name_or_path == "builtin:tiny"


def test_a_recipe_with_a_mistake_does_not_pass(tmp_path):
    broken = tmp_path / "broken" / "recipe.yaml"
    broken.parent.mkdir()
    text = (ROOT / "experiments/recipes/sft_8b/recipe.yaml").read_text()
    broken.write_text(text.replace("zero_stage: 2", "zero_stage: 7"))
    with pytest.raises(AssertionError, match=r"broken: .*zero_stage"):
        run_of(broken, tiny)


def test_no_model_and_no_data_of_a_recipe_are_downloaded():
    words = list(stand_ins(ROOT / "experiments/recipes/ppo_8b/recipe.yaml", tiny))
    assert words == [
        "actor.model_name_or_path=builtin:tiny",
        "reward.model_name_or_path=builtin:tiny",
        "data.prompt_dataset=builtin:reverse",
    ]


def test_each_recipe_that_can_be_planned_has_a_plan():
    planned = [json.loads(line)["recipe"] for line in PLANS.read_text().splitlines()]
    assert planned == [name_of(recipe) for recipe in RECIPES if is_planned(recipe)]


@pytest.mark.parametrize("recipe", RECIPES, ids=name_of)
def test_a_recipe_passes_all_checks_at_tiny_scale(recipe):
    if "load_in_4bit" in recipe.read_text():
        pytest.importorskip("bitsandbytes")
    found = preflight(with_config_file(parse(words_of(recipe))))
    assert found.problems == []
    (run,) = found.runs
    models = {key: value for key, value in all_values(run).items() if key.endswith("model_name_or_path")}
    assert {*models.values()} <= {"builtin:tiny", None}
    assert run.actor.model_name_or_path == "builtin:tiny"
