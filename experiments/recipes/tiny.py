"""Run recipes of this folder on a CPU, with tiny models and built-in rows in the place of theirs.

    python experiments/recipes/tiny.py [grpo_1p5b ...] [--print] [--curves]

What is left of a recipe is its method: each flag that is not a model, a data set, a length, a size or a number of GPUs.
It takes two steps, and says of each recipe whether it ends and how long that takes, which two_steps.jsonl keeps;
`--print` prints the command lines alone. With `--curves` it gets the sizes and learning rate of the demo of its task,
so that a tiny model learns: curves.jsonl keeps its curve, seconds and memory. Loops have no curves, since their
evaluations count scores above 0.5, which mean nothing for a tiny reward model. `python experiments/gallery.py` then
writes the pages.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import psutil
import yaml
from plan import FOLDER, RECIPES, name_of

from rlhf_suite.config import conf_dir
from rlhf_suite.config.check.formatting import quote
from rlhf_suite.config.declarations.flag_types import spell
from rlhf_suite.config.declarations.flags import flat
from rlhf_suite.config.declarations.runs import flags_of

# Sizes for two processors; a recipe takes those of the flags that its task has.
SIZES: dict[str, Any] = {
    "launch.device": "cpu",
    "logger.progress": False,
    "actor.num_nodes": 1,
    "actor.num_gpus_per_node": 1,
    "actor.aux_loss_coef": 0.0,  # no built-in model has experts
    "critic.num_nodes": 1,
    "critic.num_gpus_per_node": 1,
    "ref.num_nodes": 1,
    "ref.num_gpus_per_node": 1,
    "reward.num_nodes": 1,
    "reward.num_gpus_per_node": 1,
    "reward.overlong_buffer_len": 4,
    "vllm.num_engines": 1,
    "vllm.tensor_parallel_size": 1,
    "vllm.enable_sleep": False,
    "ds.adam_offload": False,
    "ds.param_dtype": "fp32",
    "data.max_len": 64,
    "data.max_samples": 64,
    "data.apply_chat_template": False,
    "rollout.max_new_tokens": 8,
    "rollout.batch_size": 4,
    "rollout.micro_batch_size": 4,
    "train.batch_size": 4,
    "train.micro_batch_size": 4,
    "train.max_steps": 2,
    "loop.num_iterations": 1,
}
# Those that every recipe gets whose task has them; the others only where the recipe sets them.
ALWAYS = (
    "launch.device",
    "logger.progress",
    "ds.param_dtype",
    "data.max_len",
    "data.max_samples",
    "rollout.batch_size",
    "rollout.max_new_tokens",
    "train.batch_size",
    "train.max_steps",
    "loop.num_iterations",
)
# What fits to built-in rows; the demo of the task has it.
OF_ROWS = ("data.", "eval.", "reward.rule", "algo.placeholder_token", "algo.reward_tokens")
SHARED = ("ds.ring_attn_size", "ds.tensor_parallel_size")  # two ranks share a sequence or a matrix
SCORER = "rm_8b"  # the recipe whose model scores in the others
CURVES, TWO_STEPS = FOLDER / "curves.jsonl", FOLDER / "two_steps.jsonl"
# What a curve has from the demo of the task, and sizes that make it shorter than the demo.
OF_DEMO = ("actor.adam.lr", "actor.lr_scheduler", "rollout.", "train.", "eval.")
SHORT: dict[str, dict[str, Any]] = {
    "ppo": {"rollout.batch_size": 32, "train.max_steps": 16, "eval.steps": 4},
    "loop": {},
    "supervised": {"train.max_steps": 120, "eval.steps": 20},
}
METRICS = {"sft": "train/gpt_loss", "rm": "eval/acc", "dpo": "eval/acc", "kto": "eval/auc", "prm": "eval/auc"}
METRICS |= {"distill": "eval/loss"}
SCORED, VERIFIED = "train/reward", "eval/pass1"  # of responses that a reward model scores, and that a rule does
LOOK_S = 1.0


def words_of(recipe: Path, scorer: Path, is_long: bool = False) -> Iterator[str]:
    """Yield the words that make a recipe tiny: the demo's rows and their columns, tiny models, and small sizes.
    `scorer` is the folder of a tiny reward model. `is_long`: what a tiny model needs to learn, too."""
    content = yaml.safe_load(recipe.read_text())
    task = content.get("task", "ppo")
    known, demo = flags_of(task), flat(yaml.safe_load((conf_dir() / "demo" / f"{task}.yaml").read_text()))
    written = [key for key in flat(content) if key in known]
    values = {key: value for key, value in SIZES.items() if key in written or (key in known and key in ALWAYS)}
    rows = [
        key for key in {**dict.fromkeys(written), **demo} if key.startswith(OF_ROWS) and not key.startswith("eval.")
    ]
    values |= {key: demo.get(key, known[key].default) for key in rows if key not in SIZES}
    values |= {key: demo[key] for key in written if key.startswith("eval.") and key in demo}
    values |= {key: "builtin:tiny" for key in written if key.endswith("model_name_or_path")}
    if "reward.model_name_or_path" in values:
        values |= {"reward.model_name_or_path": str(scorer), "reward.rule": None}
    if is_long:
        sections = OF_DEMO + (("critic.",) if "critic" in content else ())
        values |= {key: value for key, value in demo.items() if key.startswith(sections)}
        values |= {"data.max_samples": 4096, **SHORT[kind_of(task)]}
    if any(key in written for key in SHARED):
        values |= {"actor.num_gpus_per_node": 2, **{key: 2 for key in SHARED if key in written}}
    yield from (f"{key}={spell(value, quote)}" for key, value in values.items())


def kind_of(task: str) -> str:
    """Return `ppo`, `loop` or `supervised`."""
    return "ppo" if task == "ppo" else "supervised" if task in METRICS else "loop"


def command_of(recipe: Path, folder: Path, is_long: bool) -> list[str]:
    """Return the command line that runs a recipe at tiny scale in a folder of its name in `folder`."""
    words = words_of(recipe, folder / SCORER / "model", is_long)
    place = f"run_dir={folder / name_of(recipe)}"
    return [sys.executable, "-m", "rlhf_suite.cli", "--config", str(recipe), *words, place]


def printed(command: list[str], folder: Path) -> str:
    """Return a command line as one would write it in the root of the project."""
    text = shlex.join(["rlhf-suite", *command[3:]])
    return text.replace(f"{folder}/", "outputs/").replace(f"{FOLDER.parents[1]}/", "")


def try_recipe(recipe: Path, folder: Path) -> tuple[int, float, str]:
    """Run a recipe at tiny scale; return its exit code, its seconds and its last lines."""
    command = command_of(recipe, folder, is_long=False)
    begun = time.monotonic()
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return done.returncode, time.monotonic() - begun, (done.stdout + done.stderr)[-1500:]


def draw_curve(recipe: Path, folder: Path) -> tuple[int, float, str]:
    """Run a recipe until a tiny model has learned; add its curve to curves.jsonl; return as `try_recipe` does."""
    place, log, begun = folder / name_of(recipe), folder / f"{name_of(recipe)}.log", time.monotonic()
    command = command_of(recipe, folder, is_long=True)
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
            "command": printed(command, folder),
            "seconds": round(seconds),
            "peak_mb": round(peak),
            "load_average": round(os.getloadavg()[0], 1),
            "metric": metric,
            "points": [[row["step"], row[metric]] for row in rows if metric in row],
        }
        add_line(CURVES, line)
    return process.returncode, seconds, log.read_text()[-1500:]


def add_line(file: Path, line: dict[str, Any]) -> None:
    with file.open("a") as lines:
        lines.write(json.dumps(line) + "\n")


def metric_of(recipe: Path) -> str:
    """Return the metric that says what a recipe is for."""
    return METRICS.get(task_of(recipe), SCORED if is_scored(recipe) else VERIFIED)


def is_scored(recipe: Path) -> bool:
    """Return whether a reward model scores in the recipe."""
    return "model_name_or_path" in yaml.safe_load(recipe.read_text()).get("reward", {})


def task_of(recipe: Path) -> str:
    return str(yaml.safe_load(recipe.read_text()).get("task", "ppo"))


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
    """Run the recipes that are asked for; the reward model that scores in some of them is made first."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="names of recipes; none: all")
    parser.add_argument("--print", action="store_true", help="print the command lines, and run nothing")
    parser.add_argument("--curves", action="store_true", help="run until a tiny model has learned, and keep the curves")
    asked = parser.parse_args()
    chosen = [each for each in RECIPES if not asked.names or name_of(each) in asked.names]
    if any(is_scored(each) for each in chosen):
        chosen = list(dict.fromkeys([*chosen, *(each for each in RECIPES if name_of(each) == SCORER)]))
    chosen.sort(key=lambda recipe: name_of(recipe) != SCORER)
    if asked.curves:
        chosen = [each for each in chosen if task_of(each) == "ppo" or task_of(each) in METRICS]
    failed = []
    with TemporaryDirectory() as folder:
        for recipe in chosen:
            if asked.print:
                name, scorer = str(recipe.relative_to(FOLDER.parents[1])), Path(f"outputs/{SCORER}/model")
                print(shlex.join(["rlhf-suite", "--config", name, *words_of(recipe, scorer, asked.curves)]))
                continue
            code, seconds, text = (draw_curve if asked.curves else try_recipe)(recipe, Path(folder))
            said = "ends well" if code == 0 else f"FAILED with {code}"
            print(f"{name_of(recipe)}: {said} after {seconds:.0f} s", flush=True)
            if code:
                failed.append(name_of(recipe))
            elif not asked.curves:
                line = {"recipe": name_of(recipe), "date": time.strftime("%Y-%m-%d"), "seconds": round(seconds)}
                add_line(TWO_STEPS, line)
                print(text, flush=True)
    sys.exit(bool(failed))


if __name__ == "__main__":
    main()
