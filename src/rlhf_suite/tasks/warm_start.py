"""A built-in model for RL: warmed up once by the suite's own SFT task, then taken from the cache."""

from __future__ import annotations

import os
import subprocess
import sys

from rich.console import Console

from rlhf_suite.errors import RunError
from rlhf_suite.models.builtin import PREFIX, builtin_folder


def warm_started(path: str | None) -> str:
    """The path itself, or for `builtin:<name>` the folder of that model after `task=sft demo=warm_start`.

    A model with random weights has nothing that reinforcement could strengthen. The first use trains it and shows that
    run's progress; later uses find it in the cache.
    """
    assert path is not None
    if not path.startswith(PREFIX):
        return path
    random = builtin_folder(path, "actor.model_name_or_path")
    folder = random.with_name(f"{random.name}-sft")
    if (folder / "config.json").exists():
        return str(folder)
    Console().print(f"Warming up {path} with task=sft (once; kept in {folder})", soft_wrap=True)
    command = [sys.executable, "-m", "rlhf_suite.cli", "task=sft", "demo=warm_start", f"ckpt.output_dir={folder}"]
    if subprocess.run([*command, f"actor.model_name_or_path={path}"], check=False, env=os.environ).returncode:
        raise RunError(f"warming up {path} failed; run `{' '.join(command[1:])}` to see why")
    return str(folder)
