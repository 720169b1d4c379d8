"""A warmed-up model in the cache is that of its recipe."""

from __future__ import annotations

from rlhf_suite.config.presets import conf_dir
from rlhf_suite.tasks.warm_start import warm_folder, warm_started


def test_another_recipe_or_another_word_in_it_is_another_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    recipes = [conf_dir() / "demo" / f"{name}.yaml" for name in ("warm_start", "teacher")]
    changed = tmp_path / "warm_start.yaml"
    changed.write_text(recipes[0].read_text().replace("3e-3", "4e-3"))
    folders = [warm_folder("builtin:tiny", recipe) for recipe in (*recipes, changed)]
    assert len(set(folders)) == 3
    copy = tmp_path / "copy" / "warm_start.yaml"
    copy.parent.mkdir()
    copy.write_text(recipes[0].read_text())
    assert warm_folder("builtin:tiny", copy) == folders[0]


def test_what_is_in_the_cache_is_not_made_again_and_a_users_model_is_left_alone(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    kept = warm_folder("builtin:tiny", conf_dir() / "demo" / "teacher.yaml")
    kept.mkdir(parents=True)
    (kept / "config.json").write_text("{}")
    assert warm_started("builtin:tiny", "teacher") == str(kept)
    assert warm_started("org/model") == "org/model"
