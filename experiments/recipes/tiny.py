"""Run recipes of this folder on a CPU, with tiny models and built-in rows in the place of theirs, for two steps.

    python experiments/recipes/tiny.py [grpo ...] [--print]

What is left of a recipe is its method: each flag that is not a model, a data set, a length, a size or a number of GPUs.
It says of each recipe whether it ends, and how long that takes; `--print` prints the command lines alone.
"""

from __future__ import annotations

import argparse
import shlex
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import yaml
from plan import FOLDER, RECIPES

from rlhf_suite.config import conf_dir
from rlhf_suite.config.check.formatting import quote, spell
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


def words_of(recipe: Path, scorer: Path) -> Iterator[str]:
    """Yield the words that make a recipe tiny: the demo's rows and their columns, tiny models, and small sizes.
    `scorer` is the folder of a tiny reward model."""
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
    if any(key in written for key in SHARED):
        values |= {"actor.num_gpus_per_node": 2, **{key: 2 for key in SHARED if key in written}}
    yield from (f"{key}={spell(value, quote)}" for key, value in values.items())


def try_recipe(recipe: Path, folder: Path) -> tuple[int, float, str]:
    """Run a recipe at tiny scale; return its exit code, its seconds and its last lines."""
    words = ["--config", str(recipe), *words_of(recipe, folder / SCORER / "model"), f"run_dir={folder / recipe.stem}"]
    begun = time.monotonic()
    done = subprocess.run([sys.executable, "-m", "rlhf_suite.cli", *words], capture_output=True, text=True, check=False)
    return done.returncode, time.monotonic() - begun, (done.stdout + done.stderr)[-1500:]


def main() -> None:
    """Run the recipes that are asked for; the reward model of the others is made first."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="names of recipes; none: all")
    parser.add_argument("--print", action="store_true", help="print the command lines, and run nothing")
    asked = parser.parse_args()
    chosen = [each for each in RECIPES if each.stem == SCORER or not asked.names or each.stem in asked.names]
    chosen.sort(key=lambda recipe: recipe.stem != SCORER)
    failed = []
    with TemporaryDirectory() as folder:
        for recipe in chosen:
            if asked.print:
                name, scorer = str(recipe.relative_to(FOLDER.parents[1])), Path(f"outputs/{SCORER}/model")
                print(shlex.join(["rlhf-suite", "--config", name, *words_of(recipe, scorer)]))
                continue
            code, seconds, text = try_recipe(recipe, Path(folder))
            print(
                f"{recipe.stem}: {'ends well' if code == 0 else f'FAILED with {code}'} after {seconds:.0f} s",
                flush=True,
            )
            if code:
                failed.append(recipe.stem)
                print(text, flush=True)
    sys.exit(bool(failed))


if __name__ == "__main__":
    main()
