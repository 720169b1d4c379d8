"""What the example agents learn: the commands at the head of each file in experiments/agents, with several seeds.

    python benchmarks/agents.py [--examples calculator fences] [--seeds 1 2 3] [--again] [--write]

Runs every example that results/agents.jsonl does not have, adds a line for each, and with --write docs/agent_curves.md
and docs/agent_curves.png of all lines.
"""

from __future__ import annotations

import ast
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from common import ROOT, Run, publish, scratch, suite_run, watch
from rlhf_suite.tasks.warm_start import warm_start
from rlhf_suite.tracking.timeline import Span, length, merge_spans, overlap
from seeds import COLOURS, INK, Row, draw_seeds, finish_panel, saved, seed_parser, spread

LAST = 3  # steps at the end of a run that are taken together


@dataclass(frozen=True)
class Example:
    """An example: the metric of how often it used what answers it, the name of that, and what counts as right."""

    metric: str
    used: str
    right: str
    passed: str = "train/pass_rate"  # the metric of what counts as right


EXAMPLES = {
    "second_try": Example("agent/turns", "turns", "the first answer is right"),
    "guess": Example("agent/turns", "turns", "the number is found"),
    "nim": Example("agent/turns", "turns", "the first player wins", "train/first/pass_rate"),
    "calculator": Example("agent/calls", "calls", "the sum is right"),
    "chat_client": Example("agent/calls", "calls", "the sum is right"),
    "harnesses": Example("agent/calls", "calls", "the digit is above 4"),
    "fences": Example("agent/python_calls", "calls", "the sum is right"),
}

HEAD = """<!-- Written by: python benchmarks/agents.py --write -->

# What the example agents learn

The commands at the head of its file run each example, with another seed for each run (`train.seed`, also of the
training before RL). The start is the first RL step, and the end is the mean of the last {last} steps. A step has 128
episodes or more. A cell has the mean over seeds, and in brackets the lowest and the highest value.

![Share of right answers over RL steps](agent_curves.png)

| example | seeds | right, start | right, end | used, start | used, end | tool time | only tools | seconds |
|---|---|---|---|---|---|---|---|---|
"""
TAIL = """
"Right" means: {right}. "Used" is the number per episode of: {used}.

"Tool time" is the share of the time of the RL steps in which a tool, an environment or a program worked for at
least one episode. "Only tools" is the share in which also no engine wrote a response and nothing was trained, so that
the step waited only for tools. The seconds are those of all commands of a run, including the training before RL, on
two CPU cores with a load average of {load} at the end.
"""


def commands(example: str) -> list[str]:
    """Return the commands at the head of an example."""
    head = ast.get_docstring(ast.parse((ROOT / f"experiments/agents/{example}/agent.py").read_text())) or ""
    return [" ".join(line.split()) for line in head.splitlines() if line.split()[:1] == ["python"]]


def known() -> dict[tuple[str, int], Row]:
    """Return the newest line of every run whose commands are still the same."""
    rows = {(row["example"], row["seed"]): row for row in saved("agents")}
    return {key: row for key, row in rows.items() if key[0] in EXAMPLES and row["commands"] == commands(key[0])}


def measure(example: str, seed: int) -> Row:
    """Run the commands of an example, the last of which is its RL: what it learnt, step by step."""
    with scratch() as folder:
        run, costs = ran(example, seed, folder)
        timeline = [json.loads(row) for row in (folder / "run" / "timeline.jsonl").read_text().splitlines()]
    return {
        "example": example,
        "seed": seed,
        "commands": commands(example),
        "right": [round(row[EXAMPLES[example].passed], 4) for row in run.steps],
        "used": [round(row[EXAMPLES[example].metric], 4) for row in run.steps],
        "step_s": round(Run.mean("timing/step_total", run.steps), 3),
        **tool_time(run, timeline),
        **costs,
    }


def ran(example: str, seed: int, folder: Path) -> tuple[Run, dict[str, float]]:
    """Run the commands of an example. Return its RL, whose run folder is `folder`/run, and what all of them took."""
    seconds = cpu_s = peak_mb = 0.0
    for line in commands(example):
        words = line.replace("/tmp/", f"{folder}/").split()[1:]
        words += [f"train.seed={seed}"] if words[0] == "run.py" else []
        if "task=ppo" in words:
            run = suite_run(words[1:], folder / "run")
            usage = run.usage
        else:
            usage = watch([sys.executable, *words], folder / "before.log")
        seconds += usage.ended - usage.started
        cpu_s += usage.cpu_between(usage.started, usage.ended)
        peak_mb = max(peak_mb, usage.peak_pss_mb)
    return run, {"seconds": round(seconds, 1), "cpu_s": round(cpu_s, 1), "peak_pss_mb": round(peak_mb)}


def tool_time(run: Run, timeline: Sequence[Row]) -> dict[str, float]:
    """Return the share of the RL steps in which environments worked, and the share in which nothing else did."""
    steps = merge_spans([(row["time"] - row["timing/step_total"], row["time"]) for row in run.steps])
    tools = intersection(spans(timeline, {"environments"}), steps)
    others = spans(timeline, {"engines", "trainer", "rewards"})
    whole, working = length(steps), length(tools)
    return {
        "tool_share": round(working / whole, 4),
        "tool_share_alone": round((working - overlap(tools, others)) / whole, 4),
    }


def spans(timeline: Sequence[Row], who: set[str]) -> list[Span]:
    """Return when one of `who` was busy."""
    return merge_spans([(row["begin"], row["end"]) for row in timeline if row["who"] in who])


def intersection(first: Sequence[Span], second: Sequence[Span]) -> list[Span]:
    """Return what two unions of spans have in common."""
    pairs = [(max(a, c), min(b, d)) for a, b in first for c, d in second]
    return merge_spans([(begin, end) for begin, end in pairs if begin < end])


def write(rows: Sequence[Row]) -> None:
    """Write the page and the picture."""
    lines = []
    for example in EXAMPLES:
        if chosen := [row for row in rows if row["example"] == example]:
            lines.append(table_line(example, chosen))
    load = [row["machine"]["load_average"] for row in rows]
    right, used = (
        "; ".join(f"`{example}` {getattr(each, name)}" for example, each in EXAMPLES.items())
        for name in ("right", "used")
    )
    tail = TAIL.format(right=right, used=used, load=f"{min(load):.0f} to {max(load):.0f}")
    (ROOT / "docs" / "agent_curves.md").write_text(HEAD.format(last=LAST) + "\n".join(lines) + "\n" + tail)
    draw(rows, ROOT / "docs" / "agent_curves.png")


def table_line(example: str, rows: Sequence[Row]) -> str:
    """Return a row of the table."""
    right, used = ([row[name] for row in rows] for name in ("right", "used"))
    cells = [
        f"[{example}](../experiments/agents/{example}/README.md)",
        str(len(rows)),
        spread([each[0] for each in right]),
        spread([float(np.mean(each[-LAST:])) for each in right]),
        spread([each[0] for each in used]),
        spread([float(np.mean(each[-LAST:])) for each in used]),
        spread([row["tool_share"] for row in rows]),
        spread([row["tool_share_alone"] for row in rows]),
        f"{np.mean([row['seconds'] for row in rows]):.0f}",
    ]
    return f"| {' | '.join(cells)} |"


def draw(rows: Sequence[Row], path: Path) -> None:
    """Draw a panel per example: the share of right answers, and the calls or turns per episode."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    shown = [example for example in EXAMPLES if any(row["example"] == example for row in rows)]
    figure = Figure(figsize=(3.2 * len(shown), 3.6), layout="constrained")
    FigureCanvasAgg(figure)
    for axes, example in zip(figure.subplots(1, len(shown), squeeze=False)[0], shown, strict=True):
        chosen = [row for row in rows if row["example"] == example]
        draw_seeds(axes, [row["right"] for row in chosen], COLOURS[1], "share of right answers")
        draw_seeds(axes, [row["used"] for row in chosen], COLOURS[3], f"{EXAMPLES[example].used} per episode", "--")
        axes.set_ylim(bottom=0)
        finish_panel(axes, example)
        axes.legend(frameon=False, labelcolor=INK, fontsize="small")
    figure.savefig(path, dpi=140)


def main() -> None:
    parser = seed_parser(__doc__, "agent_curves")
    parser.add_argument("--examples", nargs="+", default=[*EXAMPLES], choices=[*EXAMPLES])
    given = parser.parse_args()
    warm_start("builtin:tiny", prompts="builtin:reverse")  # what second_try begins with is made once
    for seed in given.seeds:  # first all examples with one seed, so that a part of the runs is a whole table
        for example in given.examples:
            if given.again or (example, seed) not in known():
                publish("agents", measure(example, seed), save=True)
            if given.write:
                write([*known().values()])


if __name__ == "__main__":
    main()
