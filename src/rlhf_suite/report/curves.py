"""The picture of a run, drawn from its metrics.jsonl: one panel each for reward or loss, accuracy, KL and length.

A panel shows one quantity. It is drawn if the run has logged that quantity, in training or in an evaluation.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlhf_suite.errors import UserError
from rlhf_suite.foreign_text import printable
from rlhf_suite.report.history import History, Points, Repetitions
from rlhf_suite.run_folders.run_folder import RunFolder
from rlhf_suite.tracking.metrics import read_rows

if TYPE_CHECKING:
    from matplotlib.axes import Axes

PASS_BY_CALLS = re.compile(r"eval/calls_(?P<calls>\d+)/pass(?P<k>\d+)")
REACH = 3  # steps to either side that the running mean over the raw values includes


@dataclass(frozen=True)
class Panel:
    """One quantity. `train` are metric names, of which the first that a run has is drawn. All evaluation metrics whose
    names end in one of `evaluation` are drawn."""

    title: str
    train: tuple[str, ...]
    evaluation: tuple[str, ...]


REWARD = Panel("reward", ("train/reward", "rollout/reward_mean"), ("reward",))
LOSS = Panel(
    "loss", ("train/loss", "train/gpt_loss", "train/teacher_kl"), ("loss", "gpt_loss", "teacher_kl")
)  # the last: distillation without a reward
ACCURACY = Panel(
    "accuracy",
    ("train/pass_rate", "train/acc", "train/auc"),
    ("pass1", "acc", "auc"),
)
KL = Panel("KL to the reference", ("train/kl",), ())
LENGTH = Panel("response length (tokens)", ("train/response_length",), ("response_length_mean",))


def rows_once(path: Path) -> list[dict[str, Any]]:
    """Return the rows of a metrics.jsonl, of steps that were run again only the last."""
    kept, repetitions = list[dict[str, Any]](), Repetitions()
    for row in read_rows(path):
        if repetitions.is_again(row):
            kept = [earlier for earlier in kept if earlier["step"] < row["step"]]
        kept.append(row)
    return kept


def series(path: Path) -> dict[str, Points]:
    """Return every metric of a metrics.jsonl as (step, value) points in order, one for each step, as a History does."""
    history = History(path)
    history.read()
    return {name: [*points] for name, points in history.curves.items()}


def draw_curves(folder: RunFolder) -> Path:
    """Draw `curves.png` into the run folder and return its path.

    Raises:
        UserError: the folder has neither a reward nor a loss.
    """
    path = folder.path / "curves.png"
    path.write_bytes(make_picture(folder))
    return path


def make_picture(folder: RunFolder) -> bytes:
    """Return the curves of a run as they stand, as a PNG.

    Raises:
        UserError: the folder has neither a reward nor a loss.
    """
    curves = series(folder.metrics)
    shown = panels(curves)
    if not shown:
        names = ", ".join((*REWARD.train, *LOSS.train))
        raise UserError(f"{folder.metrics} has none of {names}. Give the folder of a run that has trained")
    unit = (
        "iteration" if folder.loop.exists() else "RL step" if find_training_points(REWARD, curves) else "optimiser step"
    )
    return draw(folder.path.resolve().name, unit, shown, curves)


def draw_calls(folder: RunFolder) -> Path | None:
    """Draw `calls.png`, pass@k by the number of allowed calls in the last evaluation, into the run folder, and return
    its path; None if the run has not measured it."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    lines: dict[int, list[tuple[int, float]]] = {}
    for name, points in series(folder.metrics).items():
        if (match := PASS_BY_CALLS.fullmatch(name)) is not None:
            lines.setdefault(int(match["k"]), []).append((int(match["calls"]), points[-1][1]))
            step = points[-1][0]
    if not lines:
        return None
    figure = Figure(figsize=(7, 4.5), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    for k, values in sorted(lines.items()):
        axes.plot(*zip(*sorted(values), strict=True), marker="o", label=f"pass@{k}")
    axes.set_title(f"{folder.path.resolve().name}, step {step}")
    axes.set_xlabel("allowed calls")
    axes.set_ylabel("share of prompts that are solved")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.grid(alpha=0.3)
    axes.legend()
    path = folder.path / "calls.png"
    figure.savefig(path, dpi=130)
    return path


def panels(curves: dict[str, Points]) -> list[Panel]:
    """Return the panels for these metrics, first the reward or else the loss; none if there is neither. An accuracy
    that is the reward, as that of a rule is, has no panel of its own."""
    main = [panel for panel in (REWARD, LOSS) if find_training_points(panel, curves)][:1]
    others = [
        panel
        for panel in (ACCURACY, KL, LENGTH)
        if find_training_points(panel, curves) or find_evaluation_points(panel, curves)
    ]
    if main == [REWARD] and ACCURACY in others and select_points(REWARD, curves) == select_points(ACCURACY, curves):
        main, others = [replace(REWARD, title=f"{REWARD.title} = {ACCURACY.title}")], others[1:]
    return [*main, *others] if main else []


def select_points(panel: Panel, curves: dict[str, Points]) -> tuple[list[Points], list[Points]]:
    """Return the points of a panel: of training and of evaluations."""
    return [*find_training_points(panel, curves).values()], [*find_evaluation_points(panel, curves).values()]


def find_training_points(panel: Panel, curves: dict[str, Points]) -> dict[str, Points]:
    """Return the panel's training metric by its name; empty if the run has none."""
    name = next((name for name in panel.train if name in curves), None)
    return {} if name is None else {name: curves[name]}


def find_evaluation_points(panel: Panel, curves: dict[str, Points]) -> dict[str, Points]:
    """Return the panel's metrics of every evaluation set, by their names."""
    endings = tuple(f"/{name}" for name in panel.evaluation)
    return {
        name: points for name, points in sorted(curves.items()) if name.startswith("eval/") and name.endswith(endings)
    }


def running_mean(points: Points, reach: int) -> Points:
    """Return the mean of each value with up to `reach` values before and after it, at the same steps (no lag)."""
    values = [value for _, value in points]
    windows = [values[max(0, i - reach) : i + reach + 1] for i in range(len(values))]
    return [(step, sum(window) / len(window)) for (step, _), window in zip(points, windows, strict=True)]


def draw(title: str, unit: str, panels: Sequence[Panel], curves: dict[str, Points]) -> bytes:
    """Return a PNG with the panels, at most two side by side."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    columns, rows = min(2, len(panels)), -(-len(panels) // 2)
    figure = Figure(figsize=(1 + 6 * columns, 1 + 3.5 * rows), layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle(title)
    for number, panel in enumerate(panels, start=1):
        draw_panel(figure.add_subplot(rows, columns, number), panel, unit, curves)
    picture = BytesIO()
    figure.savefig(picture, dpi=130, format="png")
    return picture.getvalue()


def draw_panel(axes: Axes, panel: Panel, unit: str, curves: dict[str, Points]) -> None:
    """Draw training as a line (with its running mean where there are many steps) and evaluations as dashed lines."""
    from matplotlib.ticker import MaxNLocator

    for name, points in find_training_points(panel, curves).items():
        steps, values = zip(*points, strict=True)
        if len(points) <= 2 * REACH:
            axes.plot(steps, values, color="tab:blue", marker="o", linewidth=2, label=name)
            continue
        axes.plot(steps, values, color="tab:blue", alpha=0.3, linewidth=1, label=name)
        _, means = zip(*running_mean(points, REACH), strict=True)
        axes.plot(steps, means, color="tab:blue", linewidth=2, label="running mean")
    for number, (name, points) in enumerate(find_evaluation_points(panel, curves).items(), start=1):
        steps, values = zip(*points, strict=True)
        label = printable(name).replace("$", r"\$")  # names of data sources: a dollar would begin a formula
        axes.plot(steps, values, color=f"C{number}", marker="o", linestyle="--", linewidth=1, label=label)
    axes.set_title(panel.title)
    axes.set_xlabel(unit)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.grid(alpha=0.3)
    axes.legend()
