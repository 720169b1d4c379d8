"""The curve of a run, from its metrics.jsonl: reward per step for RL or per iteration of a loop, else loss per step."""

from __future__ import annotations

from pathlib import Path

from rlhf_suite.errors import UserError
from rlhf_suite.train.metrics import read_rows
from rlhf_suite.train.run_folder import RunFolder

REWARDS = ("train/reward", "rollout/reward_mean")
LOSSES = ("train/loss", "train/gpt_loss", "train/teacher_kl")  # the last: distillation without a reward
REACH = 3  # of the running mean drawn over the raw values: so many steps to either side

Points = list[tuple[int, float]]


def series(path: Path) -> dict[str, Points]:
    """Every metric of a metrics.jsonl as (step, value) points in order; nulls are left out."""
    found: dict[str, Points] = {}
    for row in read_rows(path):
        for name, value in row.items():
            if "/" in name and value is not None:
                found.setdefault(name, []).append((row["step"], value))
    return found


def draw_curves(folder: RunFolder) -> Path:
    """Draw `curves.png` into the run folder and return its path.

    RL: the train reward and the pass@1 of each evaluation set. Supervised: train and evaluation loss.

    Raises:
        UserError: the folder holds no reward and no loss.
    """
    found = series(folder.metrics)
    main = next((name for name in (*REWARDS, *LOSSES) if name in found), None)
    if main is None:
        raise UserError(f"{folder.metrics} has none of {', '.join((*REWARDS, *LOSSES))}: is this the folder of a run?")
    last, unit = main.split("/")[-1], "optimiser step" if main in LOSSES else "RL step"
    unit = "iteration" if folder.loop.exists() else unit
    wanted = "pass1" if main in REWARDS else last
    evaluations = {name: points for name, points in sorted(found.items()) if _is_evaluation(name, wanted)}
    path = folder.path / "curves.png"
    title = f"{folder.path.resolve().name}: {_words(last)} per {unit.split()[-1]}"
    _draw(path, title, unit, {main: found[main]}, evaluations)
    return path


def running_mean(points: Points, reach: int) -> Points:
    """The mean of each value with up to `reach` values before and after it, at the same steps (so without a lag)."""
    values = [value for _, value in points]
    windows = [values[max(0, i - reach) : i + reach + 1] for i in range(len(values))]
    return [(step, sum(window) / len(window)) for (step, _), window in zip(points, windows, strict=True)]


def _is_evaluation(name: str, metric: str) -> bool:
    return name.startswith("eval/") and name.endswith(f"/{metric}")


def _words(metric: str) -> str:
    return {"reward_mean": "reward", "gpt_loss": "loss (nats per token)", "pass1": "pass@1"}.get(metric, metric)


def _draw(path: Path, title: str, unit: str, train: dict[str, Points], evaluations: dict[str, Points]) -> None:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    figure = Figure(figsize=(8, 4.5), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    for name, points in train.items():
        steps, values = zip(*points, strict=True)
        if len(points) <= 2 * REACH:
            axes.plot(steps, values, color="tab:blue", marker="o", linewidth=2, label=name)
            continue
        axes.plot(steps, values, color="tab:blue", alpha=0.3, linewidth=1, label=name)
        _, means = zip(*running_mean(points, REACH), strict=True)
        axes.plot(steps, means, color="tab:blue", linewidth=2, label="its running mean")
    for number, (name, points) in enumerate(evaluations.items(), start=1):
        steps, values = zip(*points, strict=True)
        axes.plot(steps, values, color=f"C{number}", marker="o", linestyle="--", linewidth=1, label=name)
    axes.set_title(title)
    axes.set_xlabel(unit)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_ylabel(" and ".join(dict.fromkeys(_words(name.split("/")[-1]) for name in [*train, *evaluations])))
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=130)
