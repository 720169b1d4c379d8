"""What each recipe of this folder needs, planned: writes plans.jsonl, which the pages of the gallery show.

    python experiments/recipes/plan.py [--gpu h100-80]

Nothing is downloaded. For each model a folder with its config.json alone is made from the published shape below.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import yaml

from rlhf_suite.composition.arguments import parse
from rlhf_suite.composition.config_file import with_config_file
from rlhf_suite.config.declarations.runs import Run
from rlhf_suite.config.declarations.task_groups import TRAINED
from rlhf_suite.planner.devices import find_device
from rlhf_suite.planner.estimate import estimate
from rlhf_suite.planner.needs import DeviceUse, Estimate, Target, gib
from rlhf_suite.preflight.jobs import preflight

FOLDER = Path(__file__).parent
RECIPES = sorted(FOLDER.glob("*/recipe.yaml"))
PLANS = FOLDER / "plans.jsonl"
LLAMA_8B = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 128_256,
    "hidden_size": 4096,
    "intermediate_size": 14_336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
}
SHAPES = {
    "meta-llama/Meta-Llama-3-8B": LLAMA_8B,
    "OpenRLHF/Llama-3-8b-sft-mixture": LLAMA_8B,
    "OpenRLHF/Llama-3-8b-rm-700k": LLAMA_8B,
    "meta-llama/Meta-Llama-3-70B-Instruct": LLAMA_8B
    | {"hidden_size": 8192, "intermediate_size": 28_672, "num_hidden_layers": 80, "num_attention_heads": 64},
    "mistralai/Mixtral-8x7B-v0.1": LLAMA_8B
    | {
        "model_type": "mixtral",
        "architectures": ["MixtralForCausalLM"],
        "vocab_size": 32_000,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
    },
    "deepseek-ai/DeepSeek-R1-Distill-Qwen-1.5B": {
        "model_type": "qwen2",
        "architectures": ["Qwen2ForCausalLM"],
        "vocab_size": 151_936,
        "hidden_size": 1536,
        "intermediate_size": 8960,
        "num_hidden_layers": 28,
        "num_attention_heads": 12,
        "num_key_value_heads": 2,
    },
    "mistralai/Mistral-7B-v0.1": LLAMA_8B
    | {"model_type": "mistral", "architectures": ["MistralForCausalLM"], "vocab_size": 32_000},
    "Qwen/Qwen3-1.7B": {
        "model_type": "qwen3",
        "architectures": ["Qwen3ForCausalLM"],
        "vocab_size": 151_936,
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "tie_word_embeddings": True,
    },
}


ROWS = {"rm": "reverse_pairs", "dpo": "reverse_pairs", "kto": "reverse_labelled", "prm": "reverse_steps"}


def name_of(recipe: Path) -> str:
    """Return the name of a recipe, which is that of its folder."""
    return recipe.parent.name


def stand_ins(recipe: Path, model: Callable[[str], str]) -> Iterator[str]:
    """Yield words that put `model` of its name in the place of each model of a recipe, and built-in rows in the place
    of its data."""
    for section, flags in yaml.safe_load(recipe.read_text(encoding="utf-8")).items():
        if isinstance(flags, dict) and (name := flags.get("model_name_or_path")):
            yield f"{section}.model_name_or_path={model(name)}"
    data = yaml.safe_load(recipe.read_text(encoding="utf-8"))["data"]
    rows = ROWS.get(yaml.safe_load(recipe.read_text(encoding="utf-8")).get("task", "ppo"), "reverse")
    name = "dataset" if "dataset" in data else "prompt_dataset"
    yield f"data.{name}=builtin:{rows}"


def run_of(recipe: Path, model: Callable[[str], str]) -> Run:
    """Return the run that a recipe describes, with stand-ins for what would be downloaded; all checks have passed."""
    line = with_config_file(parse(["--config", str(recipe), *stand_ins(recipe, model)]))
    found = preflight(line)
    assert not found.problems, f"{name_of(recipe)}: {found.problems}"
    (run,) = found.runs
    return run


def is_planned(recipe: Path) -> bool:
    """Return whether a recipe has a plan here: each stage of a loop has one of its own, and adapters on 4 bits need the
    package bitsandbytes."""
    content = yaml.safe_load(recipe.read_text(encoding="utf-8"))
    return content.get("task", "ppo") in TRAINED and not content["ds"].get("load_in_4bit")


def config_folder(folder: Path, name: str) -> str:
    """Return a folder with the config.json of a model of SHAPES."""
    path = folder / name.replace("/", "--")
    path.mkdir(exist_ok=True)
    (path / "config.json").write_text(json.dumps(SHAPES[name]))
    return str(path)


def row(recipe: Path, gpu: str, found: Estimate) -> dict[str, object]:
    """Return the line about a recipe: its GPUs, the memory of each of them and of the host, and whether that fits."""
    return {
        "recipe": name_of(recipe),
        "gpu": gpu,
        "gpus": sum(use.count for use in found.devices),
        "needs": "; ".join(map(used, found.devices)),
        "host": gib(sum(found.host.values())),
        "fits": found.fits,
    }


def used(use: DeviceUse) -> str:
    names = " + ".join(each.name for each in use.processes)
    return f"{use.count} x {names}: {gib(use.peak)}"


def main() -> None:
    """Plan all recipes and write what they need."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gpu", default="h100-80")
    parser.add_argument("--only", default="", help="print recipes with this in their names, and write nothing")
    asked = parser.parse_args()
    gpu = find_device(asked.gpu)
    lines = []
    with TemporaryDirectory() as folder:
        for recipe in (each for each in RECIPES if asked.only in name_of(each) and is_planned(each)):
            run = run_of(recipe, lambda name: config_folder(Path(folder), name))
            lines.append(json.dumps(row(recipe, asked.gpu, estimate(run, Target(gpu, gpu.memory, None)))))
            print(lines[-1], flush=True)
    if not asked.only:
        PLANS.write_text("".join(f"{line}\n" for line in lines))


if __name__ == "__main__":
    main()
