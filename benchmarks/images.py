"""Whether models that read images learn by reinforcement: the demo of coloured digits, with several seeds.

    python benchmarks/images.py [--seeds 1 2 3] [--kinds idefics3 qwen2_5_vl] [--again] [--write]

Runs every seed of each kind of model that results/images.jsonl does not have, adds a line for each, and with --write
docs/image_curves.md and docs/image_curves.png of all lines.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from common import ROOT, publish, scratch, suite_run
from rlhf_suite.config.plan.run_plan import IMAGE_RECIPE
from rlhf_suite.tasks.warm_start import warm_start
from seeds import COLOURS, INK, Row, draw_seeds, finish_panel, saved, seed_parser, spread

sys.path.append(str(ROOT / "tests"))

from image_families import make_seeing  # it is found by the line above

LAST = 3  # steps at the end of a run that are taken together
WORDS = ["task=ppo", "demo=ppo_images"]
# What each kind of model is called on the page.
KINDS = {"idefics3": "Idefics3 (`builtin:vision`)", "qwen2_5_vl": "Qwen2.5-VL (`tests/image_families.py`)"}
PAGE = """<!-- Written by: python benchmarks/images.py --write -->

# How well a model learns to read images by reinforcement learning

`python run.py {words} train.seed=<seed>` trains tiny models, which were first trained a little on examples
(`demo=images_warm_start`). They read two coloured digits in an image. The evaluation has images that training does not
have. A cell has the mean over seeds, and in brackets the lowest and the highest value. The end of training is the mean
of its last {last} steps.

![Share of right answers over steps](image_curves.png)

| model | seeds | training, start | end | evaluation, start | end | mismatch | seconds | load |
|---|---|---|---|---|---|---|---|---|
{rows}

The mismatch is the mean |difference| of the log-probs of engine and trainer in the worst step. The seconds are those of
a run on two CPU cores, with the load average at its end.
"""
ROW = (
    "| {kind} | {seeds} | {right_start} | {right_end} | {evaluated_start} | {evaluated_end} | {drift:.1e} "
    "| {seconds:.0f} | {load} |"
)


def words_of(kind: str) -> list[str]:
    """Return the command of a kind of model; the demo has one of its own."""
    return WORDS if kind == "idefics3" else [*WORDS, f"actor.model_name_or_path=<{kind}>"]


def warm_model(kind: str, folder: Path) -> Path:
    """Return the folder of a model after the warm start of the demo."""
    if kind == "idefics3":
        return Path(warm_start("builtin:vision", IMAGE_RECIPE))
    make_seeing(folder / "random", kind)
    words = ["task=sft", f"demo={IMAGE_RECIPE}", f"actor.model_name_or_path={folder / 'random'}"]
    suite_run(words, folder / "warm")
    return folder / "warm" / "model"


def measure(kind: str, model: Path, seed: int) -> Row:
    """Run the demo with a seed: the share of right answers in each step and in each evaluation."""
    with scratch() as folder:
        words = [word.replace(f"<{kind}>", str(model)) for word in words_of(kind)]
        run = suite_run([*words, f"train.seed={seed}"], folder / "run")
        rows = [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]
    return {
        "seed": seed,
        "words": words_of(kind),
        "right": [round(row["train/pass_rate"], 4) for row in run.steps],
        "evaluated": [round(row["eval/pass1"], 4) for row in rows if "eval/pass1" in row],
        "drift": [row["mismatch/mean"] for row in run.steps],
        "seconds": round(run.usage.ended - run.usage.started, 1),
    }


def known(kind: str) -> dict[int, Row]:
    """Return the newest line of every seed of a kind whose command is still the same."""
    return {row["seed"]: row for row in saved("images") if row["words"] == words_of(kind)}


def write() -> None:
    """Write the page and the picture of all kinds that have lines."""
    rows_of = {kind: [*known(kind).values()] for kind in KINDS if known(kind)}
    lines = "\n".join(row_of(kind, rows) for kind, rows in rows_of.items())
    (ROOT / "docs" / "image_curves.md").write_text(PAGE.format(words=" ".join(WORDS), last=LAST, rows=lines))
    draw({kind: [row["right"] for row in rows] for kind, rows in rows_of.items()})


def row_of(kind: str, rows: Sequence[Row]) -> str:
    """Return the row of the page for a kind of model."""
    load = [row["machine"]["load_average"] for row in rows]
    cells = {
        "right_start": spread([row["right"][0] for row in rows]),
        "right_end": spread([float(np.mean(row["right"][-LAST:])) for row in rows]),
        "evaluated_start": spread([row["evaluated"][0] for row in rows]),
        "evaluated_end": spread([row["evaluated"][-1] for row in rows]),
        "drift": max(max(row["drift"]) for row in rows),
        "seconds": np.mean([row["seconds"] for row in rows]),
        "load": f"{min(load):.0f} to {max(load):.0f}",
        "seeds": len(rows),
        "kind": KINDS[kind],
    }
    return ROW.format(**cells)


def draw(curves: dict[str, list[list[float]]]) -> None:
    """Draw the share of right answers over steps, of each kind."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(5.6, 3.4), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    for kind, colour in zip(curves, COLOURS[1:], strict=False):
        draw_seeds(axes, curves[kind], colour, kind)
    axes.set_ylim(0, 1)
    finish_panel(axes, "Share of right answers about coloured digits")
    axes.legend(frameon=False, labelcolor=INK, fontsize="small")
    figure.savefig(ROOT / "docs" / "image_curves.png", dpi=140)


def main() -> None:
    parser = seed_parser(__doc__, "image_curves")
    parser.add_argument("--kinds", nargs="+", choices=[*KINDS], default=[*KINDS])
    given = parser.parse_args()
    for kind in given.kinds:
        seeds = [seed for seed in given.seeds if given.again or seed not in known(kind)]
        with scratch() as folder:
            model = warm_model(kind, folder) if seeds else folder
            for seed in seeds:
                publish("images", measure(kind, model, seed), save=True)
    if given.write:
        write()


if __name__ == "__main__":
    main()
