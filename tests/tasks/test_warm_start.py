"""A warmed-up model in the cache is that of its recipe and of the task that it was warmed up for."""

from __future__ import annotations

import subprocess

import pytest
import yaml

from rlhf_suite.config import conf_dir
from rlhf_suite.config.plan.run_plan import IMAGE_RECIPE
from rlhf_suite.data import builtin
from rlhf_suite.tasks.warm_start import RECIPE_TASK, RECIPES, command_of, same_tasks, warm_folder, warm_start

DEMOS = conf_dir() / "demo"


def test_another_recipe_or_another_word_in_it_or_beside_it_is_another_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    recipes = [DEMOS / f"{name}.yaml" for name in ("warm_start", "teacher")]
    changed = tmp_path / "warm_start.yaml"
    changed.write_text(recipes[0].read_text().replace("3e-3", "4e-3"))
    folders = [warm_folder("builtin:tiny", recipe, []) for recipe in (*recipes, changed)]
    folders += [warm_folder("builtin:tiny", recipes[0], [f"data.dataset={name}"]) for name in ("a", "b")]
    assert len(set(folders)) == 5
    copy = tmp_path / "copy" / "warm_start.yaml"
    copy.parent.mkdir()
    copy.write_text(recipes[0].read_text())
    assert warm_folder("builtin:tiny", copy, []) == folders[0]


def test_what_is_in_the_cache_is_not_made_again_and_a_users_model_is_left_alone(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    kept = warm_folder("builtin:tiny", DEMOS / "teacher.yaml", [])
    kept.mkdir(parents=True)
    (kept / "config.json").write_text("{}")
    assert warm_start("builtin:tiny", "teacher") == warm_start("builtin:tiny", "teacher", "my.jsonl") == str(kept)
    assert warm_start("org/model", prompts="builtin:sort") == "org/model"


@pytest.mark.parametrize(
    ("prompts", "rows"),
    [
        ("builtin:sort", "builtin:sort_noisy"),
        ("builtin:sort_eval", "builtin:sort_noisy"),
        ("builtin:sort, builtin:addition", "builtin:addition_noisy,builtin:sort_noisy"),
        ("builtin:reverse", ""),
        ("builtin:chat", ""),
        ("builtin:sort,my.jsonl", ""),
        (None, ""),
    ],
)
def test_a_warm_up_is_on_the_task_of_the_prompts(prompts, rows):
    assert same_tasks(prompts, "_noisy") == rows


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_recipe_names_the_rows_that_it_is_said_to(recipe):
    task = "digits" if recipe == IMAGE_RECIPE else RECIPE_TASK
    rows = f"{builtin.PREFIX}{task}{RECIPES[recipe][1]}"
    assert f"\n  dataset: {rows}\n" in (DEMOS / f"{recipe}.yaml").read_text()
    assert rows.removeprefix(builtin.PREFIX) in builtin.names()


@pytest.mark.notices(
    "a cache folder whose name has a comma or brackets ends every demo",
    "tasks/warm_start.py",
    "{quote(str(folder))}",
    "{folder}",
)
def test_the_cache_may_be_in_a_folder_of_any_name(tmp_path):
    folder = tmp_path / "a, b=c (d)" / "model"
    command = command_of("builtin:tiny", "warm_start", folder, [])
    shown = subprocess.run([*command, "--cfg", "job"], capture_output=True, text=True, check=False)
    assert yaml.safe_load(shown.stdout)["ckpt"]["output_dir"] == str(folder), shown.stderr
