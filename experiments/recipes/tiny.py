"""Run recipes of this folder at tiny scale: what their pages show, and that they end.

    python experiments/recipes/tiny.py [grpo_1p5b ...] [--curves]

Each recipe takes two steps with `scale=tiny` (src/rlhf_suite/composition/scales.py, and tiny.yaml beside some recipes),
and two_steps.jsonl keeps how long that takes. With `--curves` it runs until a tiny model has learned: curves.jsonl
keeps its curve, seconds and memory. Of a loop it keeps what the reward model says of held-out answers, and beside it
what a rule does. `python experiments/gallery.py` then writes the pages.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import psutil
import yaml
from plan import FOLDER, RECIPES, name_of

from rlhf_suite.config.declarations.task_groups import LOOPS

CURVES, TWO_STEPS = FOLDER / "curves.jsonl", FOLDER / "two_steps.jsonl"
SHORT = ("train.max_steps=2", "data.max_samples=64")
METRICS = {"sft": "train/gpt_loss", "rm": "eval/acc", "dpo": "eval/acc", "kto": "eval/auc", "prm": "eval/auc"}
METRICS |= {"distill": "eval/loss", **dict.fromkeys(LOOPS, "eval/reward")}
SCORED, VERIFIED = "train/reward", "eval/pass1"  # of responses that a reward model scores, and that a rule does
LOOK_S = 1.0


def words_of(recipe: Path) -> list[str]:
    """Return the words that run a recipe at tiny scale, as its page shows them."""
    return ["--config", str(recipe), "scale=tiny"]


def command_of(recipe: Path, folder: Path, *words: str) -> list[str]:
    """Return the command that runs a recipe at tiny scale in a folder of its name in `folder`."""
    place = f"run_dir={folder / name_of(recipe)}"
    return [sys.executable, "-m", "rlhf_suite.cli", *words_of(recipe), *words, place]


def try_recipe(recipe: Path, folder: Path) -> tuple[int, float, str]:
    """Run two steps of a recipe at tiny scale; return its exit code, its seconds and its last lines."""
    begun = time.monotonic()
    done = subprocess.run(command_of(recipe, folder, *SHORT), capture_output=True, text=True, check=False)
    return done.returncode, time.monotonic() - begun, (done.stdout + done.stderr)[-1500:]


def draw_curve(recipe: Path, folder: Path) -> tuple[int, float, str]:
    """Run a recipe until a tiny model has learned; add its curve to curves.jsonl; return as `try_recipe` does."""
    place, log, begun = folder / name_of(recipe), folder / f"{name_of(recipe)}.log", time.monotonic()
    command = command_of(recipe, folder)
    with log.open("w") as output:
        process = psutil.Popen(command, stdout=output, stderr=subprocess.STDOUT)
        peak = follow(process)
    seconds = time.monotonic() - begun
    if process.returncode == 0:
        metric = metric_of(recipe)
        rows = [json.loads(line) for line in (place / "metrics.jsonl").read_text().splitlines()]
        line = {
            "recipe": name_of(recipe),
            "date": time.strftime("%Y-%m-%d"),
            "seconds": round(seconds),
            "peak_mb": round(peak),
            "load_average": round(os.getloadavg()[0], 1),
            "metric": metric,
            "points": points(rows, metric),
        }
        if task_of(recipe) in LOOPS:
            line["rule"] = points(rows, VERIFIED)
        add_line(CURVES, line)
    return process.returncode, seconds, log.read_text()[-1500:]


def points(rows: list[dict[str, Any]], metric: str) -> list[list[float]]:
    """Return the values of a metric with their steps."""
    return [[row["step"], row[metric]] for row in rows if metric in row]


def add_line(file: Path, line: dict[str, Any]) -> None:
    with file.open("a", encoding="utf-8") as lines:
        lines.write(json.dumps(line) + "\n")


def metric_of(recipe: Path) -> str:
    """Return the metric that says what a recipe is for."""
    return METRICS.get(task_of(recipe), SCORED if is_scored(recipe) else VERIFIED)


def is_scored(recipe: Path) -> bool:
    """Return whether a reward model scores in the recipe."""
    return "model_name_or_path" in yaml.safe_load(recipe.read_text(encoding="utf-8")).get("reward", {})


def task_of(recipe: Path) -> str:
    return str(yaml.safe_load(recipe.read_text(encoding="utf-8")).get("task", "ppo"))


def follow(process: psutil.Popen) -> float:
    """Wait for a process; return the most MiB that it and its children held together; a shared page counts once."""
    peak = 0.0
    while process.poll() is None:
        held = 0
        with suppress(psutil.NoSuchProcess):
            for each in [process, *process.children(recursive=True)]:
                with suppress(psutil.NoSuchProcess, psutil.AccessDenied):
                    held += each.memory_full_info().pss
        peak = max(peak, held / 2**20)
        time.sleep(LOOK_S)
    return peak


def main() -> None:
    """Run the recipes that are asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="names of recipes; none: all")
    parser.add_argument("--curves", action="store_true", help="run until a tiny model has learned, and keep the curves")
    asked = parser.parse_args()
    chosen = [each for each in RECIPES if not asked.names or name_of(each) in asked.names]
    if asked.curves:
        chosen = [each for each in chosen if task_of(each) == "ppo" or task_of(each) in METRICS]
    failed = []
    with TemporaryDirectory() as folder:
        for recipe in chosen:
            code, seconds, text = (draw_curve if asked.curves else try_recipe)(recipe, Path(folder))
            said = "ends well" if code == 0 else f"FAILED with {code}"
            print(f"{name_of(recipe)}: {said} after {seconds:.0f} s", flush=True)
            if code:
                failed.append(name_of(recipe))
                print(text, flush=True)
            elif not asked.curves:
                line = {"recipe": name_of(recipe), "date": time.strftime("%Y-%m-%d"), "seconds": round(seconds)}
                add_line(TWO_STEPS, line)
    sys.exit(bool(failed))


if __name__ == "__main__":
    main()
