"""How fast task=ppo goes round: a GRPO step of 8 prompts x 8 samples x 128 new tokens, by phase.

The whole job is measured, with Ray's daemons and every actor: CPU seconds and memory are of all its processes.
`--demo` measures `python run.py task=ppo` as it is instead: its wall time from command to end, by phase.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from common import Run, common_arguments, memory, model_of, publish, scratch, suite_run

PROMPTS = 8
LONGEST_PROMPT = 1024  # tokens


def main() -> None:
    """Run and print one JSON line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    common_arguments(parser)
    parser.add_argument("--samples", type=int, default=8, help="per prompt")
    parser.add_argument("--new-tokens", type=int, default=128, help="cap of a response; random weights seldom end it")
    parser.add_argument("--prompts", type=Path, help="a file of rows with `input` and `label`, for builtin:reverse")
    parser.add_argument("--demo", action="store_true", help="the default job instead")
    parser.add_argument("--save", action="store_true", help="add the line to results/ppo.jsonl")
    arguments = parser.parse_args()
    publish("ppo", demo(arguments) if arguments.demo else grpo(arguments), arguments.save)


def grpo(arguments: argparse.Namespace) -> dict[str, Any]:
    """Steps of one GRPO job, without a reference model."""
    warmup, samples = arguments.warmup, PROMPTS * arguments.samples
    with scratch() as folder:
        run = suite_run(grpo_flags(arguments), folder / "run")
    counted = sum(new_tokens(row, samples) for row in run.steps[warmup:])
    return {
        "mode": "grpo",
        **run.rates(warmup, counted, samples * (arguments.steps - warmup)),
        "mismatch": run.steps[-1]["mismatch/mean"],
        "bytes_of_a_sync": run.steps[-1]["sync/bytes"],
        "config": {
            "model": arguments.shape or Path(arguments.model).name,
            "device": arguments.device,
            "dtype": arguments.dtype,
            "samples": samples,
            "new_tokens_per_sample": round(counted / samples / (arguments.steps - warmup), 1),
            "steps": arguments.steps,
        },
    }


def grpo_flags(arguments: argparse.Namespace) -> list[str]:
    """The command line of the job: one optimiser step per rollout."""
    samples = PROMPTS * arguments.samples
    return [
        "experiment=grpo",
        f"actor.model_name_or_path={model_of(arguments)}",
        "algo.kl.init_coef=0",
        "algo.kl.use_loss=false",
        "reward.rule=exact_match",
        f"data.prompt_dataset={arguments.prompts or 'builtin:reverse'}",
        "data.input_template=null",
        "data.label_key=label",
        f"data.max_len={arguments.new_tokens + LONGEST_PROMPT}",
        f"rollout.batch_size={PROMPTS}",
        f"rollout.n_samples_per_prompt={arguments.samples}",
        f"rollout.max_new_tokens={arguments.new_tokens}",
        f"train.batch_size={samples}",
        f"train.max_steps={arguments.steps}",
        f"ds.param_dtype={arguments.dtype}",
        f"launch.device={arguments.device}",
        *arguments.set,
    ]


def demo(arguments: argparse.Namespace) -> dict[str, Any]:
    """The default job."""
    with scratch() as folder:
        run = suite_run(["task=ppo", *arguments.set], folder / "run")
    phases = {name: round(seconds * len(run.steps), 2) for name, seconds in run.phases(0).items()}
    total_s = run.usage.ended - run.usage.started
    return {
        "mode": "demo",
        "wall_s": round(total_s, 1),
        "cpu_s": round(sum(run.usage.looks[-1].values()), 1),
        "startup_s": round(run.startup_s, 1),
        "shutdown_s": round(run.usage.ended - run.steps[-1]["time"], 1),
        "steps": max(row["step"] for row in run.steps),
        **memory(run.usage),
        "phase_s": phases,
        "reward": [reward(run, first) for first in (True, False)],
    }


def reward(run: Run, first: bool) -> float:
    """Mean reward of the first or the last five steps."""
    values = [row["train/reward"] for row in run.steps if "train/reward" in row]
    chosen = values[:5] if first else values[-5:]
    return round(sum(chosen) / len(chosen), 3)


def new_tokens(row: dict[str, Any], samples: int) -> float:
    """Tokens that the engines wrote in a step."""
    return float(row["train/response_length"]) * samples


if __name__ == "__main__":
    main()
