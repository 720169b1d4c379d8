"""Each recipe of experiments/recipes is a run that passes all checks, with small models in the place of large ones."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from rlhf_suite.composition.arguments import parse
from rlhf_suite.composition.config_file import with_config_file
from rlhf_suite.preflight.jobs import preflight

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "experiments" / "recipes"))

from plan import RECIPES, SHAPES, TABLE, is_planned, run_of, stand_ins  # noqa: E402
from tiny import words_of  # noqa: E402

PAGE = (ROOT / "experiments" / "recipes" / "README.md").read_text()


def tiny(name):
    assert name in SHAPES, f"{name} has no shape to plan with"
    return "builtin:tiny"


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: path.stem)
def test_a_recipe_passes_all_checks_with_a_small_model(recipe):
    if "load_in_4bit" in recipe.read_text():
        pytest.importorskip("bitsandbytes")
    assert run_of(recipe, tiny).actor.model_name_or_path == "builtin:tiny"


def test_a_recipe_with_a_mistake_does_not_pass(tmp_path):
    broken = tmp_path / "sft.yaml"
    broken.write_text((ROOT / "experiments/recipes/sft_8b.yaml").read_text().replace("zero_stage: 2", "zero_stage: 7"))
    with pytest.raises(AssertionError, match=r"sft\.yaml: .*zero_stage"):
        run_of(broken, tiny)


def test_no_model_and_no_data_of_a_recipe_are_downloaded():
    words = list(stand_ins(ROOT / "experiments/recipes/ppo_8b.yaml", tiny))
    assert words == [
        "actor.model_name_or_path=builtin:tiny",
        "reward.model_name_or_path=builtin:tiny",
        "data.prompt_dataset=builtin:reverse",
    ]


def test_the_page_has_each_recipe_in_both_tables():
    described, planned = PAGE.split(TABLE)
    for recipe in RECIPES:
        link = f"| [{recipe.stem}]({recipe.name}) |"
        assert (described.count(link), planned.count(link)) == (1, is_planned(recipe))
    assert PAGE.count(".yaml) |") == len(RECIPES) + sum(map(is_planned, RECIPES))


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: path.stem)
def test_a_recipe_passes_all_checks_at_tiny_scale(recipe, tmp_path):
    if "load_in_4bit" in recipe.read_text():
        pytest.importorskip("bitsandbytes")
    found = preflight(with_config_file(parse(["--config", str(recipe), *words_of(recipe, tmp_path)])))
    assert found.problems == []
    (run,) = found.runs
    assert run.actor.model_name_or_path == "builtin:tiny"
