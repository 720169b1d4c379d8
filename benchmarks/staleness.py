"""What staleness costs: a small job whose rollouts are made by weights that are S steps old, with two corrections.

    python benchmarks/staleness.py [--seeds 1 2 3] [--again] [--write]

Runs every job that results/staleness.jsonl does not have, adds a line for each, and with --write docs/staleness.md and
docs/staleness.png of all lines. Rollouts are made ahead of training and whole, so that the age of each token is exactly
S but for the first steps, and a run with the same seed gives the same numbers each time.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from common import ROOT, publish, scratch, suite_run
from rlhf_suite.tasks.warm_start import warm_start
from seeds import COLOURS, INK, SEEDS, Row, draw_seeds, finish_panel, saved, seed_parser, spread

AGES = (0, 1, 4, 8)
CORRECTIONS = ("tis", "icepop")
STEPS = 30
LINE = (
    "task=ppo algo.advantage.estimator=rloo rollout.batch_size=32 rollout.n_samples_per_prompt=8 train.batch_size=128 "
    f"train.max_steps={STEPS} eval.dataset=builtin:reverse_eval eval.max_samples=128 eval.n_samples_per_prompt=4 "
    f"eval.steps={STEPS} logger.progress=false"
)

HEAD = """<!-- Written by: python benchmarks/staleness.py --write -->

# How staleness affects learning

A tiny model that sometimes answers `reverse 3172 =` right is trained for {steps} RL steps of 32 prompts x 8 samples
(two optimiser steps each), with rollouts by weights that are S steps old, and the correction `tis` or `icepop`.
Everything else is the same. Accuracy is pass@1 on 128 questions that are in no other set: the mean over seeds, and
in brackets the lowest and the highest value.

![Rewards over RL steps by staleness](staleness.png)

| S | correction | seeds | accuracy at the start | at the end | mean reward, all steps | mean weight | effective share |
|---|---|---|---|---|---|---|---|
"""
TAIL = """
There are few seeds, so two rows whose ranges of accuracy overlap do not show which is better. The mean reward over all
steps varies less.

The last two columns are `correction/ratio` and `correction/ess` over the second half of a run. This is the
command of a run, with the first seed:

    python run.py {line}
"""


def words(age: int, correction: str, seed: int) -> list[str]:
    """The command line of a run."""
    line = f"{LINE} correction={correction} train.async_enable=true train.async_queue_size={age} train.seed={seed}"
    return line.split()


def known() -> dict[tuple[int, str, int], Row]:
    """The newest line of every run."""
    return {(row["age"], row["correction"], row["seed"]): row for row in saved("staleness") if row["line"] == LINE}


def measure(age: int, correction: str, seed: int) -> Row:
    """Run one job: what it learnt, step by step."""
    warm_start("builtin:tiny", prompts="builtin:reverse")
    with scratch() as folder:
        usage = suite_run(words(age, correction, seed), folder / "run").usage
        rows = [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]
    trained = [row for row in rows if "train/reward" in row]
    later = trained[len(trained) // 2 :]
    return {
        "age": age,
        "correction": correction,
        "seed": seed,
        "line": LINE,
        "accuracy": [row["eval/pass1"] for row in rows if "eval/pass1" in row],
        "rewards": [round(row["train/reward"], 4) for row in trained],
        "staleness_mean": trained[-1]["async/staleness_mean"],
        **{name: float(np.mean([row[f"correction/{name}"] for row in later])) for name in ("ratio", "ess", "masked")},
        "seconds": round(usage.ended - usage.started, 1),
        "cpu_s": round(usage.cpu_between(usage.started, usage.ended), 1),
    }


def write(rows: Sequence[Row]) -> None:
    """Write the page and the picture."""
    lines = []
    for age in AGES:
        for correction in CORRECTIONS:
            chosen = [row for row in rows if (row["age"], row["correction"]) == (age, correction)]
            if chosen:
                lines.append(table_line(age, correction, chosen))
    page = HEAD.format(steps=STEPS) + "\n".join(lines) + "\n" + TAIL.format(line=" ".join(words(1, "tis", SEEDS[0])))
    (ROOT / "docs" / "staleness.md").write_text(page)
    draw(rows, ROOT / "docs" / "staleness.png")


def table_line(age: int, correction: str, rows: Sequence[Row]) -> str:
    """A row of the table."""
    first, last = ([row["accuracy"][place] for row in rows] for place in (0, -1))
    cells = [
        str(age),
        f"`{correction}`",
        str(len(rows)),
        f"{np.mean(first):.3f}",
        spread(last),
        f"{np.mean([row['rewards'] for row in rows]):.3f}",
        f"{np.mean([row['ratio'] for row in rows]):.3f}",
        f"{np.mean([row['ess'] for row in rows]):.3f}",
    ]
    return f"| {' | '.join(cells)} |"


def draw(rows: Sequence[Row], path: Path) -> None:
    """Draw a panel per correction, with a line per staleness: the mean over seeds."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 4.2), layout="constrained")
    FigureCanvasAgg(figure)
    all_axes = figure.subplots(1, len(CORRECTIONS), sharey=True)
    for axes, correction in zip(all_axes, CORRECTIONS, strict=True):
        for age, colour in zip(AGES, COLOURS, strict=True):
            rewards = [row["rewards"] for row in rows if (row["age"], row["correction"]) == (age, correction)]
            if rewards:
                draw_seeds(axes, rewards, colour, f"S = {age}")
        finish_panel(axes, correction)
    all_axes[0].set_ylabel("reward (mean of the seeds, and their range)", color=INK)
    handles, names = all_axes[0].get_legend_handles_labels()
    figure.legend(handles, names, loc="outside upper center", ncols=len(AGES), frameon=False, labelcolor=INK)
    figure.savefig(path, dpi=140)


def main() -> None:
    given = seed_parser(__doc__, "staleness").parse_args()
    for seed in given.seeds:  # first all jobs with one seed, so that a part of the runs is a whole table
        for age in AGES:
            for correction in CORRECTIONS:
                if given.again or (age, correction, seed) not in known():
                    publish("staleness", measure(age, correction, seed), save=True)
                if given.write:
                    write([*known().values()])


if __name__ == "__main__":
    main()
