"""Whether calls rise only where a tool helps: the commands of experiments/agents/when_to_call/agent.py, with several
seeds.

    python benchmarks/when_to_call.py [--seeds 1 2 3] [--again] [--write]

Runs every seed that results/when_to_call.jsonl does not have, adds a line for each, and with --write
docs/when_to_call.md and docs/when_to_call.png of all lines.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from agents import LAST, commands, ran
from common import ROOT, publish, scratch
from seeds import COLOURS, INK, Row, draw_seeds, finish_panel, saved, seed_parser, spread

EXAMPLE = "when_to_call"
KINDS = {"sum": "the tool helps", "given": "the answer is in the question"}
SHOWN = {"right": "share of right answers", "calls": "calls per episode"}

HEAD = """<!-- Written by: python benchmarks/when_to_call.py --write -->

# When a model calls a tool

A tiny model that cannot add must give sums. For half of the questions a tool helps; the other questions already contain
the answer. Each call costs 0.3 of the reward, and a right answer gives 1. Before RL, the model learned to call the tool
for half of the questions of either kind. A run has both kinds of questions. The commands are those at the head of
[when_to_call](../experiments/agents/when_to_call/README.md), with another seed for each run (`train.seed`). The start
is the first RL step, and the end is the mean of the last {last} steps. A step has about 64 episodes of each kind. A
cell has the mean over seeds, and in brackets the lowest and the highest value.

![Right answers and calls over RL steps, by the kind of the question](when_to_call.png)

| question | seeds | calls, start | calls, end | right, start | right, end |
|---|---|---|---|---|---|
"""
TAIL = """
A run takes {seconds} seconds, including the training before RL, on two CPU cores with a load average of {load} at the
end.
"""


def known() -> dict[int, Row]:
    """Return the newest line of every seed whose commands are still the same."""
    return {row["seed"]: row for row in saved(EXAMPLE) if row["commands"] == commands(EXAMPLE)}


def measure(seed: int) -> Row:
    """Run the example: calls and right answers of each kind of question, step by step."""
    with scratch() as folder:
        run, costs = ran(EXAMPLE, seed, folder)
    curves = {
        kind: {
            "right": curve(run.steps, f"train/{kind}/pass_rate"),
            "calls": curve(run.steps, f"reward/calls_{kind}"),
        }
        for kind in KINDS
    }
    return {"seed": seed, "commands": commands(EXAMPLE), **curves, **costs}


def curve(steps: Sequence[Row], name: str) -> list[float]:
    """The metric at each step. Where all questions of a step are of one kind, it has the values of the step before."""
    values: list[float] = []
    for step in steps:
        values.append(round(step[name], 4) if name in step else values[-1])
    return values


def write(rows: Sequence[Row]) -> None:
    """Write the page and the picture."""
    load = [row["machine"]["load_average"] for row in rows]
    seconds = f"{np.mean([row['seconds'] for row in rows]):.0f}"
    tail = TAIL.format(seconds=seconds, load=f"{min(load):.0f} to {max(load):.0f}")
    lines = [table_line(kind, rows) for kind in KINDS]
    (ROOT / "docs" / f"{EXAMPLE}.md").write_text(HEAD.format(last=LAST) + "\n".join(lines) + "\n" + tail)
    draw(rows, ROOT / "docs" / f"{EXAMPLE}.png")


def table_line(kind: str, rows: Sequence[Row]) -> str:
    """Return a row of the table."""
    cells = [KINDS[kind], str(len(rows))]
    for name in ("calls", "right"):
        curves = [row[kind][name] for row in rows]
        cells += [spread([each[0] for each in curves]), spread([float(np.mean(each[-LAST:])) for each in curves])]
    return f"| {' | '.join(cells)} |"


def draw(rows: Sequence[Row], path: Path) -> None:
    """Draw a panel of calls and one of right answers, each with a curve for each kind of question."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8.0, 3.6), layout="constrained")
    FigureCanvasAgg(figure)
    for axes, name in zip(figure.subplots(1, 2), ("calls", "right"), strict=True):
        for kind, colour in zip(KINDS, (COLOURS[1], COLOURS[3]), strict=True):
            draw_seeds(axes, [row[kind][name] for row in rows], colour, KINDS[kind])
        axes.set_ylim(bottom=0)
        finish_panel(axes, SHOWN[name])
        axes.legend(frameon=False, labelcolor=INK, fontsize="small")
    figure.savefig(path, dpi=140)


def main() -> None:
    given = seed_parser(__doc__, EXAMPLE).parse_args()
    for seed in given.seeds:
        if given.again or seed not in known():
            publish(EXAMPLE, measure(seed), save=True)
        if given.write:
            write([*known().values()])


if __name__ == "__main__":
    main()
