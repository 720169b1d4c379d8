"""The picture of who was busy when in the last steps of an RL run, and what the driver waited for."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlhf_suite.foreign_files import has_type, json_lines
from rlhf_suite.run_folders.run_folder import RunFolder
from rlhf_suite.tracking.timeline import Interval, Span, length, merge_spans

if TYPE_CHECKING:
    from matplotlib.axes import Axes

FIELDS: dict[str, Any] = {"who": str, "what": str, "begin": float, "end": float | None}  # of a line
STEPS = 6  # that are shown
LEAST = 1e-3  # of the time: what takes less is not drawn
BEFORE_STEPS, LAST_OF_STEP = "weight_sync", "ppo_train"  # later syncs may go on while the next step trains
INK, FAINT, OTHER = "#333333", "#DDDDDD", "#BBBBBB"

# The colour of each phase in every chart: Okabe and Ito's, and others between them.
COLOURS = {
    "generation": "#009E73",
    "episodes": "#CC79A7",
    "reward": "#F0E442",
    "judging": "#C9BD2C",
    "evaluation": "#8A6FB0",
    "make_experience": "#56B4E9",
    "ppo_train": "#0072B2",
    "train": "#0072B2",  # of a task without rollouts
    "weight_sync": "#D55E00",
    "probe": "#F2B08A",
    "save": "#7F5F42",
    # of training that clients ask for, call by call
    "forward_backward": "#2F86C1",
    "optim_step": "#8CCBEE",
    "sampling": "#3DB48C",
    "save_state": "#9A7B5E",
    "load_state": "#B89878",
    "create_model": "#B06F95",
    "unload_model": "#DDA9C5",
    "waiting_for_clients": "#C4C4C4",
    "waiting_for_rollout": "#ABABAB",
    "waiting_for_batch": "#999999",
    "waiting_for_deadline": "#6B6B6B",
    "waiting_for_reward": "#B8AE3C",
    "waiting_to_sync": "#E69F00",
    "waiting_for_sync": "#F5C869",
    "waiting_for_evaluation": "#C3B1D9",
}


@dataclass(frozen=True)
class Lane:
    """A row of the picture: who was busy, and the title of the row."""

    who: str
    title: str


LANES = (
    *(Lane(who, who) for who in ("engines", "environments", "rewards", "judge", "evaluation", "trainer")),
    Lane("driver", "driver waits"),
)


def colour_of(phase: str) -> str:
    """Return the colour of a phase in every chart."""
    return COLOURS.get(phase, OTHER)


def draw_timeline(folder: RunFolder) -> Path | None:
    """Draw `timeline.png` into the run folder and return its path; None if the run has no timeline of a whole step."""
    ends, intervals = last_steps(folder)
    if len(ends) < 2:
        return None
    path = folder.path / "timeline.png"
    draw(path, f"{folder.path.resolve().name}, the last {len(ends) - 1} steps", ends, intervals)
    return path


def last_steps(folder: RunFolder) -> tuple[list[float], list[Interval]]:
    """Return the ends of the last steps, the first of them that before these steps, and the intervals of the run.

    A run that was continued, or started again, has them from then on, so that the time in which it did not work is not
    among them; if no step has ended since, from the time before. A line that a kill has torn is left out.
    """
    lines = json_lines(folder.timeline) if folder.timeline.exists() else ()
    intervals = [Interval(**line) for _, line in lines if is_interval(line)]
    borders = [-math.inf, *folder.starts(), math.inf]
    for begin, end in reversed([*pairwise(borders)]):
        part = [interval for interval in intervals if begin <= interval.begin < end]
        if len(ends := ends_of_steps(part)) > 1:
            return ends, part
    return [], intervals


def ends_of_steps(intervals: Sequence[Interval]) -> list[float]:
    """Return the ends of the last steps, and before them the end of what came before these."""
    begin, ends = (
        sorted(interval.end for interval in intervals if interval.what == phase and interval.end is not None)
        for phase in (BEFORE_STEPS, LAST_OF_STEP)
    )
    return [*begin[:1], *ends][-STEPS - 1 :]


def is_interval(line: Any) -> bool:
    """Return whether a line of a timeline is an interval."""
    is_known = has_type(line, dict[str, Any]) and line.keys() == FIELDS.keys()
    return is_known and all(has_type(line[name], wanted) for name, wanted in FIELDS.items())


def draw(path: Path, title: str, ends: Sequence[float], intervals: Sequence[Interval]) -> None:
    """Draw the time between the first and the last of `ends`, those of steps, into a PNG file."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    lanes = [lane for lane in LANES if any(interval.who == lane.who for interval in intervals)]
    figure = Figure(figsize=(12, 1.6 + 0.62 * len(lanes)), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    for place, lane in enumerate(lanes):
        draw_lane(axes, -place, ends, [interval for interval in intervals if interval.who == lane.who])
    for end in ends:
        axes.axvline(end - ends[0], color=INK, linewidth=0.8, linestyle=":", zorder=0)
    axes.set_yticks([-place for place in range(len(lanes))], [lane.title for lane in lanes])
    axes.set_xlim(0, ends[-1] - ends[0])
    axes.set_ylim(-len(lanes) + 0.4, 0.6)
    axes.set_xlabel("seconds (dotted lines: ends of steps; on the right: the share of the time)")
    axes.set_title(title, loc="left", color=INK)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.tick_params(colors=INK, length=0)
    figure.legend(loc="outside lower center", ncols=5, frameon=False)
    figure.savefig(path, dpi=130)


def draw_lane(axes: Axes, height: int, ends: Sequence[float], intervals: Sequence[Interval]) -> None:
    """Draw one row with the share of the time that its intervals take."""
    begin, end = ends[0], ends[-1]
    axes.axhline(height, color=FAINT, linewidth=0.8, zorder=0)
    for activity in dict.fromkeys(interval.what for interval in intervals):
        spans = clip_spans([interval for interval in intervals if interval.what == activity], begin, end)
        if length(spans) > LEAST * (end - begin):
            bars = [(first - begin, last - first) for first, last in spans]
            label = activity.replace("_", " ")
            new = label not in axes.get_legend_handles_labels()[1]
            axes.broken_barh(
                bars, (height - 0.36, 0.72), color=colour_of(activity), label=label if new else None, linewidth=0
            )
    share = length(clip_spans(intervals, begin, end)) / (end - begin)
    axes.text(1.005, height, f"{share:.0%}", transform=axes.get_yaxis_transform(), va="center", color=INK)


def clip_spans(intervals: Sequence[Interval], begin: float, end: float) -> list[Span]:
    """Return the time of intervals between two moments, as spans that do not touch."""
    clipped = [
        (max(interval.begin, begin), min(end if interval.end is None else interval.end, end)) for interval in intervals
    ]
    return merge_spans([(first, last) for first, last in clipped if first < last])
