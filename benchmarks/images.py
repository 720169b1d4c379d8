"""Whether a model that reads images learns by reinforcement: the demo of coloured digits, with several seeds.

    python benchmarks/images.py [--seeds 1 2 3] [--again] [--write]

Runs every seed that results/images.jsonl does not have, adds a line for each, and with --write docs/image_curves.md and
docs/image_curves.png of all lines.
"""

from __future__ import annotations

import json
from collections.abc import Sequence

import numpy as np

from common import ROOT, publish, scratch, suite_run
from rlhf_suite.config.plan import IMAGE_RECIPE
from rlhf_suite.tasks.warm_start import warm_start
from seeds import COLOURS, INK, Row, draw_seeds, finish_panel, saved, seed_parser, spread

LAST = 3  # steps at the end of a run that are taken together
WORDS = ["task=ppo", "demo=ppo_images"]
PAGE = """<!-- Written by: python benchmarks/images.py --write -->

# What reinforcement learning of reading images reaches

`python run.py {words} train.seed=<seed>`, with {seeds} seeds: a tiny Idefics3 model, which was trained a little on
examples, reads two coloured digits in an image. The evaluation has images that training does not have. A cell has the
mean over seeds, and in brackets the lowest and the highest; the end of training is the mean of its last {last} steps.

![Share of right answers over steps](image_curves.png)

| share of right answers | start | end |
|---|---|---|
| training | {right_start} | {right_end} |
| evaluation | {evaluated_start} | {evaluated_end} |

The log-probs of the engine and of the trainer differed by {drift:.1e} on average in the worst step. A run took
{seconds:.0f} seconds on two CPU cores, with a load average of {load} at the end.
"""


def measure(seed: int) -> Row:
    """Run the demo with a seed: the share of right answers in each step and in each evaluation."""
    with scratch() as folder:
        run = suite_run([*WORDS, f"train.seed={seed}"], folder / "run")
        rows = [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]
    return {
        "seed": seed,
        "words": WORDS,
        "right": [round(row["train/pass_rate"], 4) for row in run.steps],
        "evaluated": [round(row["eval/pass1"], 4) for row in rows if "eval/pass1" in row],
        "drift": [row["mismatch/mean"] for row in run.steps],
        "seconds": round(run.usage.ended - run.usage.started, 1),
    }


def known() -> dict[int, Row]:
    """Return the newest line of every seed whose command is still the same."""
    return {row["seed"]: row for row in saved("images") if row["words"] == WORDS}


def write(rows: Sequence[Row]) -> None:
    """Write the page and the picture."""
    load = [row["machine"]["load_average"] for row in rows]
    cells = {
        "right_start": spread([row["right"][0] for row in rows]),
        "right_end": spread([float(np.mean(row["right"][-LAST:])) for row in rows]),
        "evaluated_start": spread([row["evaluated"][0] for row in rows]),
        "evaluated_end": spread([row["evaluated"][-1] for row in rows]),
        "drift": max(max(row["drift"]) for row in rows),
        "seconds": np.mean([row["seconds"] for row in rows]),
        "load": f"{min(load):.0f} to {max(load):.0f}",
        "words": " ".join(WORDS),
        "last": LAST,
        "seeds": len(rows),
    }
    (ROOT / "docs" / "image_curves.md").write_text(PAGE.format(**cells))
    draw([row["right"] for row in rows])


def draw(curves: Sequence[Sequence[float]]) -> None:
    """Draw the share of right answers over steps."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(5.6, 3.4), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    draw_seeds(axes, curves, COLOURS[1], "share of right answers")
    axes.set_ylim(0, 1)
    finish_panel(axes, "Coloured digits in an image")
    axes.legend(frameon=False, labelcolor=INK, fontsize="small")
    figure.savefig(ROOT / "docs" / "image_curves.png", dpi=140)


def main() -> None:
    given = seed_parser(__doc__, "image_curves").parse_args()
    warm_start("builtin:vision", IMAGE_RECIPE)  # what the demo begins with is made once
    for seed in given.seeds:
        if given.again or seed not in known():
            publish("images", measure(seed), save=True)
    if given.write:
        write([*known().values()])


if __name__ == "__main__":
    main()
