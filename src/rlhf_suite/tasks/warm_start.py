"""Warm start of built-in models: a task of the suite trains them once, and later runs take them from the cache."""

from __future__ import annotations

import hashlib
import os
import shlex
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

from rlhf_suite.config import conf_dir
from rlhf_suite.config.check.formatting import quote
from rlhf_suite.config.plan.run_plan import IMAGE_RECIPE, WorkerPlan
from rlhf_suite.data import builtin
from rlhf_suite.data.sources import source_names
from rlhf_suite.errors import RunError
from rlhf_suite.launch.processes import exclusive_lock
from rlhf_suite.models.builtin import PREFIX, builtin_folder
from rlhf_suite.registry import dataset
from rlhf_suite.tracking.console import show_line

P = TypeVar("P", bound=WorkerPlan)

WAIT_S = 3600.0  # for another process that is training the same model
RECIPE_TASK = "reverse"  # the built-in task whose rows the recipes name
# By recipe (a file in conf/demo): the task that runs it, and the suffix of the built-in data set that it learns from.
RECIPES = {
    IMAGE_RECIPE: ("sft", "_noisy"),
    "warm_start": ("sft", "_noisy"),
    "teacher": ("sft", ""),
    "prm": ("prm", "_steps"),
    "rm": ("rm", "_pairs"),
}


def with_warm_starts(plan: P, prompts: str | None) -> P:
    """Return the plan with the folders of its built-in models, each trained by its recipe on the tasks of `prompts`."""
    models = {
        name: replace(model, path=warm_start(model.path, model.recipe, prompts)) if model.recipe else model
        for name, model in plan.models.items()
    }
    return replace(plan, models=models)


def warm_start(path: str | None, recipe: str = "warm_start", prompts: str | None = None) -> str:
    """Return `path`, or for `builtin:<name>` the folder of this model after it was trained by a recipe.

    Reinforcement learning cannot improve a model with random weights, and a student cannot learn from one. The first
    use trains the model on the built-in tasks of `prompts` and shows the progress. Later uses find it in the cache, in
    a folder that is named after the model, the recipe, and a digest of the recipe and the flags below.
    """
    assert path is not None
    if not path.startswith(PREFIX):
        return path
    (_, form), words = RECIPES[recipe], list[str]()
    rows = "" if recipe == IMAGE_RECIPE else same_tasks(prompts, form)  # of the built-in tasks one has images
    if rows:
        # The max_steps of the recipe fits its own rows. Other rows are used for its number of epochs.
        words = [f'data.dataset="{rows}"', "eval.dataset=null", "train.max_steps=null"]
    folder = warm_folder(path, conf_dir() / "demo" / f"{recipe}.yaml", words)
    if (folder / "config.json").exists():
        return str(folder)
    with exclusive_lock(folder.with_name(f".{folder.name}.lock"), WAIT_S):  # another run may be training the same model
        if not (folder / "config.json").exists():
            warm_up(path, recipe, folder, words)
    return str(folder)


def warm_up(path: str, recipe: str, folder: Path, words: Sequence[str]) -> None:
    """Train the built-in model `path` by a recipe, in a run of its own that writes the model to `folder`.

    Raises:
        RunError: this run failed.
    """
    task, _ = RECIPES[recipe]
    shown = " ".join([f"task={task}", f"demo={recipe}", *words[:1]])
    show_line(f"Warming up {path} with {shown} (once; kept in {folder})")
    command = command_of(path, recipe, folder, words)
    # It is one process, also where this run is the first task of a Slurm job of several nodes.
    variables = {name: value for name, value in os.environ.items() if not name.startswith("SLURM_")}
    if subprocess.run(command, check=False, env=variables).returncode:
        raise RunError(f"warming up {path} failed; run `{shlex.join(command)}` to see why")


def command_of(path: str, recipe: str, folder: Path, words: Sequence[str]) -> list[str]:
    """Return the command that trains the built-in model `path` by a recipe and writes it to `folder`."""
    task, _ = RECIPES[recipe]
    command = [sys.executable, "-m", "rlhf_suite.cli", f"task={task}", f"demo={recipe}", *words]
    return [*command, f"ckpt.output_dir={quote(str(folder))}", f"actor.model_name_or_path={path}"]


def same_tasks(prompts: str | None, form: str) -> str:
    """Return the built-in data sets, with suffix `form`, of the tasks that a comma list of built-in data sets names.

    Return an empty text for any other list, and for the task whose rows the recipes name themselves.
    """
    tasks = {name.partition("_")[0] for name in source_names(prompts or "")}
    known = {builtin.PREFIX + task for task in dataset.names()}
    if not tasks <= known or tasks <= {builtin.PREFIX + RECIPE_TASK}:
        return ""
    return ",".join(f"{task}{form}" for task in sorted(tasks))


def warm_folder(path: str, recipe: Path, words: Sequence[str]) -> Path:
    """Return the cache folder of the model `path` after a recipe with the flags `words`; each combination has
    its own.
    """
    random = builtin_folder(path, "actor.model_name_or_path")
    digest = hashlib.sha256(recipe.read_bytes() + "".join(words).encode()).hexdigest()[:8]
    return random.with_name(f"{random.name}-{recipe.stem}-{digest}")
