"""A built-in model that can do something: trained once by the suite's own tasks, then taken from the cache."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from pathlib import Path

from rich.console import Console

from rlhf_suite.config.presets import conf_dir
from rlhf_suite.errors import RunError
from rlhf_suite.models.builtin import PREFIX, builtin_folder


def warm_started(path: str | None, recipe: str = "warm_start", task: str = "sft") -> str:
    """The path itself, or for `builtin:<name>` the folder of that model after `task=<task> demo=<recipe>`.

    A model with random weights has nothing that reinforcement could strengthen or a student could learn. The first use
    trains it and shows that run's progress; later uses find it in the cache, under the model, the recipe and a digest
    of what the recipe says.
    """
    assert path is not None
    if not path.startswith(PREFIX):
        return path
    folder = warm_folder(path, conf_dir() / "demo" / f"{recipe}.yaml")
    if (folder / "config.json").exists():
        return str(folder)
    Console().print(f"Warming up {path} with task={task} demo={recipe} (once; kept in {folder})", soft_wrap=True)
    command = [sys.executable, "-m", "rlhf_suite.cli", f"task={task}", f"demo={recipe}", f"ckpt.output_dir={folder}"]
    if subprocess.run([*command, f"actor.model_name_or_path={path}"], check=False, env=os.environ).returncode:
        raise RunError(f"warming up {path} failed; run `{' '.join(command[1:])}` to see why")
    return str(folder)


def warm_folder(path: str, recipe: Path) -> Path:
    """Where `path` after `recipe` is kept: another folder for another model and for other words in the recipe."""
    random = builtin_folder(path, "actor.model_name_or_path")
    return random.with_name(f"{random.name}-{recipe.stem}-{hashlib.sha256(recipe.read_bytes()).hexdigest()[:8]}")
