"""How far engine and trainer are apart on a mixture of experts, with and without routing replay.

    python benchmarks/routing.py [--save]

Each of four runs of task=ppo, in bf16 and fp32, samples from a Qwen3-MoE with random weights (four layers of four
experts, of which a token visits two), and trains it for a few steps. Printed are the mean |log-prob difference| of a
step, and the share of the engine's routes for which the trainer's router would have chosen other experts.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np

from common import publish, scratch, suite_run
from rlhf_suite.models.builtin import Shape, create

STEPS = 4
WORDS = [
    *("task=ppo", "demo=ppo", "algo.kl.init_coef=0", "rollout.batch_size=16", "rollout.n_samples_per_prompt=4"),
    *("data.max_len=192", "rollout.max_new_tokens=160", "train.batch_size=64", "train.micro_batch_size=16"),
    *("rollout.micro_batch_size=16", f"train.max_steps={STEPS}", "eval.dataset=null", "eval.steps=-1"),
]


def measure(model: Path, folder: Path, dtype: str, replays: bool) -> dict[str, float | str | bool]:
    """Return what a run measured, over its steps."""
    flags = [
        f"actor.model_name_or_path={model}",
        f"ds.param_dtype={dtype}",
        f"actor.routing_replay={str(replays).lower()}",
    ]
    steps = suite_run([*WORDS, *flags, "algo.mismatch_max=1"], folder).steps
    result = {
        "dtype": dtype,
        "routing_replay": replays,
        "mismatch": float(np.mean([row["mismatch/mean"] for row in steps])),
        "tokens": float(sum(row["train/response_length"] * 64 for row in steps)),
    }
    if replays:
        result["rerouted"] = float(np.mean([row["train/rerouted"] for row in steps]))
    return result


def main() -> None:
    """Make the four runs and print a JSON line for each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--save", action="store_true", help="add the lines to results/routing.jsonl")
    arguments = parser.parse_args()
    with scratch() as folder:
        create(folder / "model", Shape(family="qwen3_moe", layers=4))
        for dtype in ("bf16", "fp32"):
            for replays in (False, True):
                line = measure(folder / "model", folder / f"{dtype}_{replays}", dtype, replays)
                publish("routing", line, arguments.save)


if __name__ == "__main__":
    main()
