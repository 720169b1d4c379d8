"""From every number of ranks and ZeRO stage to every other: `python benchmarks/resume_matrix.py` saves a run in each
shape, goes on in each, and writes docs/resume.md."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "tests" / "train")]

import gradients  # noqa: E402, I001 - they are found by the line above
from plain_models import make_models  # noqa: E402
from ranks import Ranks  # noqa: E402
from reshape import AFTER, BEFORE, Whole, distance, load_and_go_on, save_and_go_on  # noqa: E402
from steps import Setup, same  # noqa: E402

PAGE = ROOT / "docs" / "resume.md"
HEAD = f"""# Resume on other ranks and at another ZeRO stage

`python benchmarks/resume_matrix.py` writes this page. A model is trained for {BEFORE} optimiser steps, with
AdamW at a learning rate of 1e-2, and saved; then it goes on for {AFTER} steps. Each row is a checkpoint, by
ranks x ZeRO stage. Each column is where it is loaded and goes on. What is loaded (fp32 weights, both moments,
the count of updates, the model's own weights, and their moving average) was compared bit for bit with what
was saved, gathered by functions of DeepSpeed. Each number is the largest difference of a weight, {AFTER}
steps later, from the run that was not stopped; `=` means equal bit for bit. Other ranks and stages add up the
gradients of a step in another order, and Adam moves a weight whose gradient is near zero by up to the
learning rate, whatever the size of the gradient.

"""
SHAPES = {
    "fp32": [(ranks, Setup(zero)) for ranks in (1, 2) for zero in (0, 1, 2, 3)],
    "bf16": [(ranks, Setup(zero, "bf16")) for ranks in (1, 2) for zero in (1, 2, 3)],
}


def table(shapes: list[tuple[int, Setup]], folder: Path, groups: dict[int, Ranks], place: Path) -> list[str]:
    """Return the rows of the table of a precision, and below them what was loaded bit for bit."""
    batches = [gradients.make_batch(folder)] * (BEFORE + AFTER)
    paths = [place / str(number) for number in range(len(shapes))]
    whole: list[Whole] = [
        groups[ranks].call(save_and_go_on, folder, setup, batches, path)[0]
        for (ranks, setup), path in zip(shapes, paths, strict=True)
    ]
    columns = [groups[ranks].call(load_and_go_on, folder, setup, batches, paths)[0] for ranks, setup in shapes]
    names = [f"{ranks} x {setup.zero}" for ranks, setup in shapes]
    rows = ["| saved | " + " | ".join(names) + " |", "|---" * (len(names) + 1) + "|"]
    for number, name in enumerate(names):
        cells = (said(distance(column[number].weights, whole[number].weights)) for column in columns)
        rows.append(f"| {name} | " + " | ".join(cells) + " |")
    pairs = [same(column[number].state, saved.state) for column in columns for number, saved in enumerate(whole)]
    rates = [
        [row["lr"] for row in column[number].metrics] == [row["lr"] for row in saved.metrics]
        for column in columns
        for number, saved in enumerate(whole)
    ]
    return [*rows, "", f"Loaded bit for bit: {sum(pairs)} of {len(pairs)} pairs. Equal learning rates: {sum(rates)}."]


def said(difference: float) -> str:
    return "=" if difference == 0 else f"{difference:.0e}"


def main() -> None:
    groups = {size: Ranks(size) for size in (1, 2)}
    with tempfile.TemporaryDirectory() as place:
        folder = make_models(Path(place) / "models")
        parts = [
            "\n".join([f"## {dtype}", "", *table(shapes, folder, groups, Path(place) / dtype)])
            for dtype, shapes in SHAPES.items()
        ]
    for group in groups.values():
        group.close()
    PAGE.write_text(HEAD + "\n\n".join(parts) + "\n")


if __name__ == "__main__":
    main()
