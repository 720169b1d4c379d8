"""From every shape of a run to every other: `python benchmarks/resume_matrix.py` saves a run in each, goes on in each,
and writes docs/resume.md. `ranks` makes only the tables of ranks and ZeRO stages again, and `ppo` that of reinforcement
learning; with `ppo torch shared` only its cells between these shapes. The rest of the page
stays."""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT / "tests" / part) for part in ("", "train", "e2e")]

import gradients  # noqa: E402, I001 - they are found by the line above
import jobs  # noqa: E402
import numpy as np  # noqa: E402
import reshaped_run  # noqa: E402
from plain_models import make_models  # noqa: E402
from ranks import Ranks  # noqa: E402
from reshape import AFTER, BEFORE, Whole, distance, load_and_go_on, save_and_go_on  # noqa: E402
from same_numbers import check_same_numbers  # noqa: E402
from steps import Setup, same  # noqa: E402

PAGE = ROOT / "docs" / "resume.md"
HEAD = f"""# Resume in another shape

`python benchmarks/resume_matrix.py` writes this page. A model is trained for {BEFORE} optimiser steps, with
AdamW at a learning rate of 1e-2, and saved; then it continues for {AFTER} steps. Each row is a checkpoint, by
ranks x ZeRO stage; `torch` is one rank without DeepSpeed. Each column is the shape in which the checkpoint is
loaded and the training continues. The loaded values (fp32 weights, both moments, the count of updates, the
model's own weights, and their moving average) were compared bit for bit with the saved ones. Where DeepSpeed
partitions values, its own functions gathered them. Each number is the largest difference of a weight, {AFTER} steps
later, from the run that was not stopped; `=` means equal bit for bit. Other ranks and stages add up the
gradients of a step in another order. If the gradient of a weight is near zero, Adam moves the weight by up to
the learning rate, whatever the size of the gradient.

"""
SHAPES = {
    "fp32": [(1, Setup(None)), *((ranks, Setup(zero)) for ranks in (1, 2) for zero in (0, 1, 2, 3))],
    "bf16": [(1, Setup(None, "bf16")), *((ranks, Setup(zero, "bf16")) for ranks in (1, 2) for zero in (1, 2, 3))],
}
RL = "## Reinforcement learning"
RL_HEAD = f"""{RL}

A run of `ppo` with policy, critic, reference, an average of the weights, an adapted KL coefficient and waiting samples
makes {reshaped_run.STEPS} steps in the shape of the row. A copy of it continues from step {reshaped_run.SAVED}
in the shape of the column. Samples, rewards and metrics of the later steps were compared with those of the run that
was not stopped: tokens are equal, numbers to 1e-5 (log-probs to 1e-4). Each cell is the largest difference of a
log-prob of the policy; an empty cell has not been run.

| shape | flags |
|---|---|
"""
RL_SHAPES = ("plain", "split", "shared", "torch")


def table(shapes: list[tuple[int, Setup]], folder: Path, groups: dict[int, Ranks], place: Path) -> list[str]:
    """Return the rows of the table of a precision, and below them what was loaded bit for bit."""
    batches = [gradients.make_batch(folder)] * (BEFORE + AFTER)
    paths = [place / str(number) for number in range(len(shapes))]
    whole: list[Whole] = [
        groups[ranks].call(save_and_go_on, folder, setup, batches, path)[0]
        for (ranks, setup), path in zip(shapes, paths, strict=True)
    ]
    columns = [groups[ranks].call(load_and_go_on, folder, setup, batches, paths)[0] for ranks, setup in shapes]
    names = ["torch" if setup.zero is None else f"{ranks} x {setup.zero}" for ranks, setup in shapes]
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


def tables_of_ranks() -> str:
    """Return the tables of ranks and ZeRO stages."""
    groups = {size: Ranks(size) for size in (1, 2)}
    with tempfile.TemporaryDirectory() as place:
        folder = make_models(Path(place) / "models")
        parts = [
            "\n".join([f"## {dtype}", "", *table(shapes, folder, groups, Path(place) / dtype)])
            for dtype, shapes in SHAPES.items()
        ]
    for group in groups.values():
        group.close()
    return HEAD + "\n\n".join(parts) + "\n\n"


def table_of_rl(known: str, chosen: list[str]) -> str:
    """Return the table of reinforcement learning: the cells between the `chosen` shapes, and those of `known`."""
    cells = {
        (before, after): cell.strip()
        for line in known.splitlines()
        if (before := line.split("|")[1:2]) and (before := before[0].strip()) in RL_SHAPES and line.count("|") > 3
        for after, cell in zip(RL_SHAPES, line.split("|")[2:-1], strict=True)
    }
    with tempfile.TemporaryDirectory() as place:
        runs, warm = Path(place), Path(place) / "warm"
        os.environ["XDG_CACHE_HOME"] = str(runs / "cache")
        jobs.run(runs / "warm_start", ["task=sft", "demo=warm_start", f"ckpt.output_dir={warm}"])
        words = [*jobs.ACTOR_CRITIC, f"actor.model_name_or_path={warm}"]
        for before in chosen:
            whole = runs / f"whole_{before}"
            reshaped_run.run(whole, [*words, *reshaped_run.SHAPES[before]])
            for after in (each for each in chosen if each != before):
                folder = runs / f"from_{before}_to_{after}"
                steps = reshaped_run.go_on(whole, folder, [*words, *reshaped_run.SHAPES[after]])
                check_same_numbers(folder, whole, steps)
                found = [[jobs.column(jobs.rollout(p, s), "old_log_probs") for s in steps] for p in (folder, whole)]
                worst = max(float(np.abs(a - b).max()) for a, b in zip(*found, strict=True))
                cells[before, after] = said(worst)
                print(before, after, cells[before, after], flush=True)
    flags = (f"| {name} | `{' '.join(reshaped_run.SHAPES[name]) or 'none'}` |" for name in RL_SHAPES)
    rows = (
        f"| {one} | " + " | ".join("-" if one == other else cells.get((one, other), "") for other in RL_SHAPES) + " |"
        for one in RL_SHAPES
    )
    heading = ["", "| saved | " + " | ".join(RL_SHAPES) + " |", "|---" * (len(RL_SHAPES) + 1) + "|"]
    return RL_HEAD + "\n".join([*flags, *heading, *rows]) + "\n"


def main() -> None:
    asked, *chosen = sys.argv[1:] or ["all"]
    ranks, _, rl = PAGE.read_text().partition(RL)
    if asked in ("all", "ranks"):
        ranks = tables_of_ranks()
    if asked in ("all", "ppo"):
        rl = table_of_rl(rl, chosen or [*RL_SHAPES])
    elif rl:
        rl = RL + rl
    PAGE.write_text("\n\n".join(part.strip() for part in (ranks, rl) if part) + "\n")


if __name__ == "__main__":
    main()
