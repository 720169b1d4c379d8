"""What the pages of the gallery share: measured lines, how their numbers are written, and pictures of curves."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

Row = Mapping[str, Any]  # a line of a .jsonl file
Rows = Mapping[str, Row]
Curves = Mapping[str, Sequence[tuple[float, float]]]  # a name: its values at steps
WRITTEN_BY = "<!-- Written by: python experiments/gallery.py -->\n"
INK, FAINT = "#333333", "#DDDDDD"
LINES = ("#0072B2", "#D55E00", "#009E73", "#000000")


def newest(file: Path, key: str) -> dict[str, Row]:
    """Return the last line of each name in a .jsonl file; none where there is no file."""
    rows = map(json.loads, file.read_text(encoding="utf-8").splitlines()) if file.exists() else ()
    return {row[key]: row for row in rows}


def minutes(seconds: float) -> str:
    return f"{seconds / 60:.1f}"


def gibibytes(mebibytes: float) -> str:
    return f"{mebibytes / 1024:.1f} GiB"


def draw(curves: Curves, path: Path, unit: str = "step") -> None:
    """Draw metrics over the steps, or over another `unit`; the name of a single one is the title."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(5, 2.8), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    for (name, points), colour in zip(curves.items(), LINES, strict=False):
        steps, values = zip(*points, strict=True)
        marker = "o" if len(steps) < 30 else ""
        axes.plot(steps, values, color=colour, marker=marker, linewidth=1.8, markersize=5, label=name)
    if len(curves) > 1:
        axes.legend(frameon=False, labelcolor=INK, fontsize="small")
    else:
        axes.set_title(next(iter(curves)), loc="left", color=INK, fontsize=11)
    axes.set_xlabel(unit, color=INK)
    if unit != "step":
        axes.set_xticks(steps)
    axes.grid(axis="y", color=FAINT, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.tick_params(colors=INK, length=0)
    figure.savefig(path, dpi=100)
