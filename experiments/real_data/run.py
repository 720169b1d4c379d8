"""Train every task on the files that `prepare.py` made, and show what each learnt on its held-out side.

    python experiments/real_data/run.py <folder made by prepare.py> [names of experiments]

One after the other, each a run of its own in `<folder>/<name>`; those that are done are not run again. Prints the table
of all that are done, and draws their curves into `curves.png` beside this file.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from prepare import GROUPS

ROOT = Path(__file__).parents[2]
PICTURE = Path(__file__).parent / "curves.png"
COMMON = [
    "train.batch_size=32",
    "train.micro_batch_size=8",
    "ds.param_dtype=bf16",
    "ds.zero_stage=1",
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
INSTRUCTIONS = ["data.input_key=prompt", "data.output_key=output"]
STUDENT_T = 2.262  # 97.5 % of the t distribution with GROUPS - 1 = 9 degrees of freedom
CHANCE = 0.5  # of an accuracy on pairs, and of an area under the ROC curve


@dataclass(frozen=True)
class Experiment:
    task: str
    files: str
    rate: float
    flags: list[str]
    metric: str
    epochs: int = 1
    every: int = 15  # steps between evaluations


EXPERIMENTS = {
    "sft": Experiment("sft", "instructions", 5e-4, INSTRUCTIONS, "gpt_loss"),
    "rm_dialogues": Experiment("rm", "preferences", 3e-4, DIALOGUES, "acc"),
    "rm_solutions": Experiment("rm", "solution_pairs", 3e-4, QUESTION, "acc"),
    "dpo_dialogues": Experiment("dpo", "preferences", 1e-4, [*DIALOGUES, "ref.cache_enable=true"], "acc"),
    "kto_solutions": Experiment(
        "kto", "solutions", 3e-4, [*SOLUTION, "data.max_samples=1600", "ref.cache_enable=true"], "auc", every=25
    ),
    "prm_steps": Experiment("prm", "steps", 3e-4, STEPS, "auc", epochs=2, every=25),
}
# The loss of the model that sft starts from: a step that changes no weight, then the evaluation.
UNTRAINED = "sft_untrained"
HIDDEN = {UNTRAINED: Experiment("sft", "instructions", 1e-12, [*INSTRUCTIONS, "train.max_steps=1"], "gpt_loss")}


def train(folder: Path, name: str, experiment: Experiment) -> None:
    """Run one experiment from the model that `task=sft` made of texts, `<folder>/base`."""
    files = folder / experiment.files
    words = [
        f"task={experiment.task}",
        f"actor.model_name_or_path={folder / 'base' / 'model'}",
        f"actor.adam.lr={experiment.rate}",
        f"data.dataset={files}_train.jsonl",
        f"eval.dataset='{','.join(f'{files}_held_out_{group}.jsonl' for group in range(GROUPS))}'",
        f"eval.steps={experiment.every}",
        f"train.max_epochs={experiment.epochs}",
        *COMMON,
        *experiment.flags,
        f"hydra.run.dir={folder / name}",
    ]
    subprocess.run([sys.executable, str(ROOT / "run.py"), *words], check=True, cwd=ROOT)


def evaluations(folder: Path, name: str) -> list[dict[str, float]]:
    """The rows of a run's log that evaluate, by `step` and metric."""
    rows = [json.loads(line) for line in (folder / name / "metrics.jsonl").read_text().splitlines()]
    return [row for row in rows if f"eval/{(EXPERIMENTS | HIDDEN)[name].metric}" in row]


def at_the_end(folder: Path, name: str) -> tuple[float, list[float]]:
    """The metric after training, on all held-out rows and on each group."""
    experiment, last = (EXPERIMENTS | HIDDEN)[name], evaluations(folder, name)[-1]
    groups = [f"eval/{experiment.files}_held_out_{group}/{experiment.metric}" for group in range(GROUPS)]
    return last[f"eval/{experiment.metric}"], [last[group] for group in groups]


def untrained(folder: Path, metric: str) -> tuple[float, list[float]]:
    """The same without this training."""
    return at_the_end(folder, UNTRAINED) if metric == "gpt_loss" else (CHANCE, [CHANCE] * GROUPS)


def margin(folder: Path, name: str) -> float:
    """Half of the 95 % t interval of what was gained, from the gain in each group. Groups share no question, so rows
    that do (several solutions, all steps of one) do not make it too narrow."""
    before, after = untrained(folder, EXPERIMENTS[name].metric)[1], at_the_end(folder, name)[1]
    return float(STUDENT_T * np.std(np.subtract(after, before), ddof=1) / np.sqrt(GROUPS))


def table_row(folder: Path, name: str) -> str:
    """Before and after, and what was gained with its 95 % interval, group by group."""
    metric = EXPERIMENTS[name].metric
    steps = evaluations(folder, name)[-1]["step"]
    before, after = untrained(folder, metric)[0], at_the_end(folder, name)[0]
    gain, half = after - before, margin(folder, name)
    interval = f"{gain:+.3f} ({gain - half:+.3f} to {gain + half:+.3f})"
    return f"| `{name}` | {steps} | {metric} | {before:.3f} | {after:.3f} | {interval} |"


def draw(folder: Path, names: Sequence[str]) -> None:
    """The held-out metric of every experiment over its steps, at the end with the interval of what was gained."""
    figure = Figure(figsize=(11, 5.5), layout="constrained")
    FigureCanvasAgg(figure)
    for axes, name in zip(figure.subplots(2, 3).flat, names, strict=False):
        metric = EXPERIMENTS[name].metric
        before, found = untrained(folder, metric)[0], evaluations(folder, name)
        steps, values = [row["step"] for row in found], [row[f"eval/{metric}"] for row in found]
        axes.plot([0, *steps], [before, *values], marker="o")
        axes.errorbar(steps[-1], values[-1], margin(folder, name), color="C0", capsize=4)
        axes.axhline(before, color="gray", linestyle="--")
        axes.set_title(f"{name}: {metric}")
        axes.set_xlabel("optimiser step")
        axes.grid(alpha=0.3)
    figure.savefig(PICTURE, dpi=90)


def main(folder: Path, names: Sequence[str]) -> None:
    for name in [*names, *(HIDDEN if "sft" in names else ())]:
        if not is_done(folder, name):
            train(folder, name, (EXPERIMENTS | HIDDEN)[name])
    done = [name for name in EXPERIMENTS if is_done(folder, name)]
    print("| experiment | steps | metric | untrained | trained | gain and its 95 % interval |\n" + "|---" * 6 + "|")
    for name in done:
        print(table_row(folder, name))
    draw(folder, done)


def is_done(folder: Path, name: str) -> bool:
    return (folder / name / "model" / "config.json").exists()


if __name__ == "__main__":
    main(Path(sys.argv[1]).absolute(), sys.argv[2:] or list(EXPERIMENTS))
