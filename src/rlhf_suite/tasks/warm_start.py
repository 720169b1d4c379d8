"""A built-in model that can do something: trained once by the suite's own tasks, then taken from the cache."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from rlhf_suite.config.presets import conf_dir
from rlhf_suite.data import builtin
from rlhf_suite.data.sources import source_names
from rlhf_suite.errors import RunError
from rlhf_suite.launch.processes import exclusive_lock
from rlhf_suite.models.builtin import PREFIX, builtin_folder
from rlhf_suite.tracking.console import show_line

WAIT_S = 3600.0  # for another process that warms the same model up
RECIPE_TASK = "reverse"  # the built-in task that the recipes themselves name
# What a recipe (conf/demo) is run by, and which form of a built-in task's rows it learns from.
RECIPES = {"warm_start": ("sft", "_noisy"), "teacher": ("sft", ""), "prm": ("prm", "_steps")}


def warm_started(path: str | None, recipe: str = "warm_start", prompts: str | None = None) -> str:
    """The path itself, or for `builtin:<name>` the folder of that model after a recipe, on the task of `prompts`.

    A model with random weights has nothing that reinforcement could strengthen or a student could learn. The first use
    trains it and shows that run's progress; later uses find it in the cache, under the model, the recipe, and a digest
    of what the recipe and the words below say.
    """
    assert path is not None
    if not path.startswith(PREFIX):
        return path
    (_, form), words = RECIPES[recipe], list[str]()
    if rows := same_tasks(prompts, form):
        # the recipe's max_steps fits its own rows; others are gone through as often as it says
        words = [f'data.dataset="{rows}"', "eval.dataset=null", "train.max_steps=null"]
    folder = warm_folder(path, conf_dir() / "demo" / f"{recipe}.yaml", words)
    if (folder / "config.json").exists():
        return str(folder)
    with exclusive_lock(folder.with_name(f".{folder.name}.lock"), WAIT_S):  # another run may be making the same model
        if not (folder / "config.json").exists():
            warm_up(path, recipe, folder, words)
    return str(folder)


def warm_up(path: str, recipe: str, folder: Path, words: Sequence[str]) -> None:
    """Train the built-in model `path` by a recipe, as a run of its own; the model goes to `folder`."""
    task, _ = RECIPES[recipe]
    told = " ".join([f"task={task}", f"demo={recipe}", *words[:1]])
    show_line(f"Warming up {path} with {told} (once; kept in {folder})")
    command = [sys.executable, "-m", "rlhf_suite.cli", f"task={task}", f"demo={recipe}", *words]
    command += [f"ckpt.output_dir={folder}", f"actor.model_name_or_path={path}"]
    if subprocess.run(command, check=False, env=os.environ).returncode:
        raise RunError(f"warming up {path} failed; run `{' '.join(command[1:])}` to see why")


def same_tasks(prompts: str | None, form: str) -> str:
    """The built-in sets of that form for the tasks of a comma list of built-in sets. Empty for any other list, and for
    the task that the recipes themselves name."""
    tasks = {name.partition("_")[0] for name in source_names(prompts or "")}
    known = {builtin.PREFIX + task for task in builtin.TASKS}
    if not tasks <= known or tasks <= {builtin.PREFIX + RECIPE_TASK}:
        return ""
    return ",".join(f"{task}{form}" for task in sorted(tasks))


def warm_folder(path: str, recipe: Path, words: Sequence[str]) -> Path:
    """Where `path` after `recipe` and `words` is kept: another folder for another model, recipe, word in it or beside
    it."""
    random = builtin_folder(path, "actor.model_name_or_path")
    digest = hashlib.sha256(recipe.read_bytes() + "".join(words).encode()).hexdigest()[:8]
    return random.with_name(f"{random.name}-{recipe.stem}-{digest}")
