"""What benchmarks/curves.py found, as a page and a picture: docs/benchmarks.md and docs/learning_curves.png."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

Row = dict[str, Any]  # a line of results/curves.jsonl
Panels = Mapping[str, Mapping[str, Row]]  # task: algorithm: its run

HEAD = """# Does it learn?

`python benchmarks/curves.py --write` writes this page and its picture. It makes {runs} whole runs by the command line
of the suite, on real Ray, vLLM and DeepSpeed, on two CPU cores, of about {cpu} CPU seconds each (all processes,
including the daemons of Ray). Every run starts from `builtin:tiny` (0.16 million parameters), which `task=sft` has
trained on answers of which 60 % have one wrong digit. A step has 64 prompts x 8 samples. Accuracy is pass@1 on 128
questions that are in no other set, with 4 samples each at temperature 1: mean ± standard error over the questions.
There is one seed, so a difference of less than three standard errors does not show which algorithm is better. All
values are those of one processor. Others round differently: on those that we tried, the default job with `gae` ended
between 0.87 and 0.93.

## Three tasks, six algorithms

![Accuracy on held-out questions over RL steps](learning_curves.png)

Right answers: `reverse 3172 =` 2713, `sort 3172 =` 1237, `add 317 2 =` 0319. Commands: `python run.py task=ppo
experiment=<algorithm>`, followed by

{data}

| algorithm | {tasks} | CPU seconds |
|---|{rules}---|
"""
ESTIMATORS = """
On sort, questions with a repeated digit limit the accuracy. After 32 steps of GRPO, 97 % of the answers to questions
with four different digits are right, and 62 % of the others (`evaluations/step_000032.parquet` of its run). All four
samples are right for 94 of the 128 questions and wrong for 15. At the start these numbers were 4 and 14, and 4 of the
14 are among the 15. The policy has become certain of its answers, including wrong ones.

## The default job with each estimator

`python run.py task=ppo algo.advantage.estimator=<estimator>`, with nothing else on the command line.

| estimator | first | last | best | CPU seconds | seconds | load average of the machine |
|---|---|---|---|---|---|---|
"""
# Okabe and Ito's colours, which those who see fewer colours can tell apart too; markers differ as well.
STYLES = (
    ("#0072B2", "o"),
    ("#E69F00", "s"),
    ("#009E73", "^"),
    ("#D55E00", "D"),
    ("#CC79A7", "v"),
    ("#000000", "p"),
)
MODELS = """
## Adapters, a teacher beside rewards, and a hybrid model

The runs are GRPO on reverse, as above. With LoRA, the engines hold the base model, and a weight sync sends them only
the adapters. Linear layers have adapters; the embedding, which is also the head, has none. Three other settings of LoRA
ended lower: rank 32 at a learning rate of 3e-3 (0.727), rank 16 at 5e-3 (0.719) and at 1e-2 (0.605). The teacher has
learned only from right answers.
`builtin:hybrid` is an LFM2 of 0.22 million parameters, with convolutions in two of its four layers.

| model | command | first | last | best | largest mismatch, in nats | bytes of a weight sync |
|---|---|---|---|---|---|---|
"""
INK, FAINT = "#333333", "#DDDDDD"


def page(
    panels: Panels,
    labels: Mapping[str, str],
    data: Mapping[str, Sequence[str]],
    estimators: Sequence[Row],
    models: Mapping[str, Row],
) -> str:
    """All tables. A run that is missing is an empty cell."""
    algorithms = (row for each in panels.values() for row in each.values())
    runs = {row["command_line"]: row for row in (*estimators, *algorithms, *models.values())}
    head = HEAD.format(
        runs=len(runs),
        cpu=round(float(np.median([row["cpu_s"] for row in runs.values()]))),
        data="\n".join(
            f"- {task}: {f'`{chr(32).join(words)}`' if words else 'nothing'}" for task, words in data.items()
        ),
        tasks=" | ".join(panels),
        rules="---|" * len(panels),
    )
    lines = []
    for name, label in labels.items():
        cells = [learned(each[name]) if name in each else "" for each in panels.values()]
        costs = [f"{each[name]['cpu_s']:.0f}" if name in each else "-" for each in panels.values()]
        lines.append(f"| {label}, `{name}` | {' | '.join(cells)} | {', '.join(costs)} |")
    table = [
        f"| `{row['name']}` | {value(row['points'][0])} | {value(row['points'][-1])} | {row['best']:.3f} "
        f"| {row['cpu_s']:.0f} | {row['seconds']:.0f} | {row['machine']['load_average']:.0f} |"
        for row in estimators
    ]
    kinds = [
        f"| {name} | `{row['command_line']}` | {value(row['points'][0])} | {value(row['points'][-1])} "
        f"| {row['best']:.3f} | {row['mismatch']:.1e} | {row['bytes_of_a_sync']:,.0f} |"
        for name, row in models.items()
    ]
    parts = (head, *lines, ESTIMATORS.rstrip("\n"), *table, MODELS.rstrip("\n"), *kinds)
    return "\n".join(parts).replace("|\n\n|", "|\n|") + "\n"


def learned(row: Row) -> str:
    """`first -> last` of a run."""
    return f"{value(row['points'][0])} → {value(row['points'][-1])}"


def value(point: Sequence[float]) -> str:
    """The accuracy of one evaluation, with its standard error."""
    return f"{point[1]:.3f} ± {point[2]:.3f}"


def draw(panels: Panels, labels: Mapping[str, str], path: Path) -> None:
    """A panel per task, a line per algorithm."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 4.4), layout="constrained")
    FigureCanvasAgg(figure)
    all_axes = figure.subplots(1, len(panels), sharey=True)
    for axes, (task, runs) in zip(all_axes, panels.items(), strict=True):
        for (name, label), (colour, marker) in zip(labels.items(), STYLES, strict=False):
            steps, values, _ = zip(*runs[name]["points"], strict=True) if name in runs else ([], [], [])
            axes.plot(steps, values, color=colour, marker=marker, label=label, linewidth=1.8, markersize=7, mec="white")
        axes.set_title(task, loc="left", color=INK, fontsize=13, fontweight="bold")
        axes.set_xlabel("RL step", color=INK)
        axes.set_ylim(0, 1)
        axes.margins(x=0.06)
        axes.grid(axis="y", color=FAINT, linewidth=0.8)
        axes.set_axisbelow(True)
        axes.spines[["top", "right", "left"]].set_visible(False)
        axes.spines["bottom"].set_color(FAINT)
        axes.tick_params(colors=INK, length=0)
    all_axes[0].set_ylabel("accuracy on held-out questions (pass@1)", color=INK)
    handles, names = all_axes[0].get_legend_handles_labels()
    figure.legend(handles, names, loc="outside upper center", ncols=len(labels), frameon=False, labelcolor=INK)
    figure.get_layout_engine().set(wspace=0.05)
    figure.savefig(path, dpi=150)
