"""Train every task on the files that `prepare.py` made, and print what each learnt on its held-out side.

    python experiments/real_data/run.py <folder made by prepare.py> [names of experiments]

One after the other, each a run of its own in `<folder>/<name>`; those that are done are not run again.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from math import sqrt
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
COMMON = [
    "train.batch_size=32",
    "train.micro_batch_size=8",
    "train.max_epochs=1",
    "eval.steps=15",
    "ds.param_dtype=bf16",
    "ds.zero_stage=1",
    "ds.packing_samples=true",
    "data.max_len=384",
]
DIALOGUES = ['data.turn_markers=["Human:","Assistant:"]']
QUESTION = ["data.prompt_key=question", 'data.input_template="Question: {}\nAnswer: "']
SOLUTION = [
    "data.input_key=question",
    "data.output_key=solution",
    "data.label_key=is_correct",
    'data.input_template="Question: {}\nAnswer: "',
]
STEPS = [
    "data.input_key=question",
    "data.steps_key=steps",
    "data.label_key=labels",
    'algo.placeholder_token="<|reward|>"',
    'algo.reward_tokens=["<|good|>","<|bad|>"]',
]
# name: task, files, learning rate, flags, the metric of the table
EXPERIMENTS: dict[str, tuple[str, str, str, list[str], str]] = {
    "sft": ("sft", "instructions", "5e-4", ["data.input_key=prompt", "data.output_key=output"], "gpt_loss"),
    "rm_dialogues": ("rm", "preferences", "3e-4", DIALOGUES, "acc"),
    "rm_solutions": ("rm", "solution_pairs", "3e-4", QUESTION, "acc"),
    "dpo_dialogues": ("dpo", "preferences", "1e-4", [*DIALOGUES, "ref.cache_enable=true"], "acc"),
    "kto_solutions": ("kto", "solutions", "1e-4", [*SOLUTION, "data.max_samples=1600"], "loss"),
    "prm_steps": ("prm", "steps", "3e-4", STEPS, "acc"),
}


def train(folder: Path, name: str) -> None:
    """Run one experiment from the model that `task=sft` made of texts, `<folder>/base`."""
    task, files, rate, flags, _ = EXPERIMENTS[name]
    words = [
        f"task={task}",
        f"actor.model_name_or_path={folder / 'base' / 'model'}",
        f"actor.adam.lr={rate}",
        f"data.dataset={folder / files}_train.jsonl",
        f"eval.dataset={folder / files}_held_out.jsonl",
        *COMMON,
        *flags,
        f"hydra.run.dir={folder / name}",
    ]
    subprocess.run([sys.executable, str(ROOT / "run.py"), *words], check=True, cwd=ROOT)


def rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def measured(folder: Path, name: str) -> tuple[str, ...]:
    """A row of the table: first and last evaluation; for an accuracy its 95 % interval and what guessing gives."""
    task, files, _, _, metric = EXPERIMENTS[name]
    values = [row[f"eval/{metric}"] for row in rows(folder / name / "metrics.jsonl") if f"eval/{metric}" in row]
    first, last = values[0], values[-1]
    if metric != "acc":
        return name, metric, f"{first:.3f}", f"{last:.3f}", "", ""
    held_out = rows(folder / f"{files}_held_out.jsonl")
    labels = [label for row in held_out for label in row["labels"]] if task == "prm" else []
    share = sum(map(float, labels)) / len(labels) if labels else 0.5
    low, high = wilson(last, len(labels) or len(held_out))
    return name, metric, f"{first:.3f}", f"{last:.3f}", f"{low:.3f} to {high:.3f}", f"{max(share, 1 - share):.3f}"


def wilson(share: float, count: int, z: float = 1.96) -> tuple[float, float]:
    """The Wilson score interval of a share measured on `count` independent cases (Wilson, 1927)."""
    middle = (share + z * z / (2 * count)) / (1 + z * z / count)
    half = z / (1 + z * z / count) * sqrt(share * (1 - share) / count + z * z / (4 * count * count))
    return middle - half, middle + half


def main(folder: Path, names: Sequence[str]) -> None:
    for name in names:
        if not (folder / name / "model" / "config.json").exists():
            train(folder, name)
    print("| experiment | metric | first evaluation | last | 95 % interval | guessing |")
    print("|---|---|---|---|---|---|")
    for name in names:
        print("| " + " | ".join(measured(folder, name)) + " |", flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]).absolute(), sys.argv[2:] or list(EXPERIMENTS))
