"""What benchmarks with several seeds share: the newest line of each run, means with their range, curves of
both, and their command line."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from typing import Any

import numpy as np

from common import RESULTS

SEEDS = (1, 2, 3)
REACH = 2  # steps to either side that a running mean includes
INK, FAINT = "#333333", "#DDDDDD"
COLOURS = ("#000000", "#0072B2", "#009E73", "#D55E00")
Row = dict[str, Any]  # a line of results/<benchmark>.jsonl


def seed_parser(text: str | None, page: str) -> argparse.ArgumentParser:
    """Return the command line of a benchmark that `text` describes. `page`: the name of what it writes into docs/."""
    parser = argparse.ArgumentParser(description=text, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[*SEEDS])
    parser.add_argument("--again", action="store_true", help="also runs that have a line")
    parser.add_argument("--write", action="store_true", help=f"write docs/{page}.md and docs/{page}.png")
    return parser


def saved(benchmark: str) -> list[Row]:
    """Return all lines that a benchmark has saved."""
    path = RESULTS / f"{benchmark}.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def spread(values: Sequence[float]) -> str:
    """Return the mean over seeds, and in brackets the lowest and the highest."""
    return f"{np.mean(values):.3f} ({min(values):.3f}, {max(values):.3f})"


def smooth(values: Sequence[float]) -> list[float]:
    """Return running means."""
    return [float(np.mean(values[max(0, i - REACH) : i + REACH + 1])) for i in range(len(values))]


def draw_seeds(axes: Any, curves: Sequence[Sequence[float]], colour: str, label: str, style: str = "-") -> None:
    """Draw the mean of smoothed curves [seed][step], and their range as a band."""
    smoothed = np.array([smooth(each) for each in curves])
    steps = np.arange(1, smoothed.shape[1] + 1)
    axes.fill_between(steps, smoothed.min(0), smoothed.max(0), color=colour, alpha=0.12, linewidth=0)
    axes.plot(steps, smoothed.mean(0), color=colour, linewidth=1.8, label=label, linestyle=style)


def finish_panel(axes: Any, title: str) -> None:
    """Give a panel its title and its looks."""
    axes.set_title(title, loc="left", color=INK, fontweight="bold")
    axes.set_xlabel("RL step", color=INK)
    axes.grid(axis="y", color=FAINT, linewidth=0.8)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.tick_params(colors=INK, length=0)
