"""The planner's seconds of a step against measured ones: the rate of a core is measured in one run, and given to the
plans of the others.

    python benchmarks/planner_times.py [--only <words of a name> --tflops <given rate>] [--save] [--write]

Of each run of planner.py whose ranks it measures, with a model of 12 million parameters, and of the first with the
model of 92 million parameters that planner.py has, some steps after the first are measured: the CPU seconds of a rank,
which other work on the machine changes least, and the time on the clock. The plan takes every sequence to be as long
as `data.max_len`. So that its error is that of the rate and of the operations, it is compared by the token.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from common import ROOT, publish, scratch, suite_run, write_section
from planner import LENGTH, SHAPES, Shape, checked, words_of, write_data
from qwen3 import random_qwen3
from rlhf_suite.config.declarations.runs import Run
from rlhf_suite.config.plan.run_plan import ACTOR
from rlhf_suite.models.load import model_folder
from rlhf_suite.planner.estimate import CPU_UTILISATION, estimate
from rlhf_suite.planner.needs import Target

PAGE, HEADING = ROOT / "docs" / "planner_measured.md", "## Against measured time"
STEPS = 4
LARGE, SMALL = "qwen3-0.1b", "builtin:small"
RANKS = ("_Host", "run.py")  # processes of ranks: actors of Ray, or the run itself if it has one rank
PASSES = f"{ACTOR}: passes over a step"

TEXT = f"""{HEADING}

`python benchmarks/planner_times.py --save --write`: seconds of a step of the same runs with a model of 12 million
parameters and sequences of up to {LENGTH} tokens, the mean of {STEPS - 1} steps after the first, at load averages
of {{loads}} on two cores. The rate of a core, {{rate}} x 10^9 operations per second, was measured in the first run
and given to the plans of the others (`--tflops`). The plan's own rate is the rate that it uses without `--tflops`:
it multiplies matrices just before the plan. "Measured" has the CPU seconds of a rank, and "on the clock" the wall
time, which also depends on other work of the machine. "Tokens" is the number of tokens of a step, divided by that
of the plan, whose sequences all have `data.max_len` tokens. The errors are per token.

| run | tokens | plan, given rate | plan, own rate | measured | on the clock | error, given rate | error, own rate |
|---|---|---|---|---|---|---|---|
{{rows}}
A rate that was measured in one kind of run is also right for other runs of the same model: LoRA, gradient
checkpointing, reward models and RL. It is not right for a model of another size: the model of 92 million parameters
reached a higher rate. The plan's own rate, {CPU_UTILISATION} of the rate of a product of large matrices, fits that
model and is too high for the model of 12 million. The plan does not count the update of the weights and the weights
that ranks gather from each other, so the run under ZeRO-3 is slower than its plan. For a reliable time, run a few
steps of the model, and multiply the rate by the plan's seconds divided by the measured ones. Times on GPUs, and of
generation, have not been compared with measured ones.
"""


@dataclass(frozen=True)
class Measured:
    """A step of a run: all of its tokens, the seconds of one rank on a core, and on the clock."""

    tokens: float
    cpu_s: float
    wall_s: float


def measured(shape: Shape, folder: Path, model: str) -> Measured:
    """Return the mean of the steps after the first."""
    run = suite_run(words_of(shape, folder, model, STEPS), folder / f"run-{abs(hash((shape, model)))}")
    steps, (begin, end) = run.steps[1:], run.window(1)
    busy = run.usage.cpu_by_name(begin, end)
    name = next(each for each in RANKS if each in busy)
    ranks = checked(shape, folder, model).actor.num_gpus_per_node
    tokens = sum(row["train/tokens"] for row in steps)
    return Measured(tokens / len(steps), busy[name] / ranks / len(steps), (end - begin) / len(steps))


def planned(shape: Shape, folder: Path, model: str, flops: float) -> float:
    """Return the seconds of the passes over a step, where a core makes `flops` operations per second."""
    return estimate(checked(shape, folder, model), Target(None, 1 << 40, flops)).times[PASSES]


def tokens_of(run: Run) -> int:
    """Return the tokens of a step in the plan."""
    if run.task == "ppo":
        return run.rollout.batch_size * run.rollout.n_samples_per_prompt * run.data.max_len
    return run.train.batch_size * run.data.max_len * (2 if run.task in ("rm", "dpo") else 1)


def compare(shapes: Sequence[tuple[str, Shape, str]], folder: Path, given: float = 0.0) -> list[dict[str, Any]]:
    """Return a row for each run; the rate of the first one, unless it is `given`, is given to the plans of all."""
    from rlhf_suite.planner.devices import cpu_flops

    rows: list[dict[str, Any]] = []
    for name, shape, model in shapes:
        found = measured(shape, folder, model)
        share = found.tokens / tokens_of(checked(shape, folder, model))
        given = given or share * planned(shape, folder, model, 1.0) / found.cpu_s
        own = CPU_UTILISATION * cpu_flops("fp32")
        with_given, with_own = (planned(shape, folder, model, rate) for rate in (given, own))
        rows.append(
            {
                "shape": name,
                "token_share": round(share, 3),
                "given_gflops": round(given / 1e9, 1),
                "own_gflops": round(own / 1e9, 1),
                "planned_given_s": round(with_given, 2),
                "planned_own_s": round(with_own, 2),
                "cpu_s": round(found.cpu_s, 2),
                "wall_s": round(found.wall_s, 2),
                "error_given": round(share * with_given / found.cpu_s - 1, 3),
                "error_own": round(share * with_own / found.cpu_s - 1, 3),
                "load_average": round(psutil.getloadavg()[0], 1),
            }
        )
        print(json.dumps(rows[-1]), flush=True)
    return rows


def section(rows: list[dict[str, Any]]) -> str:
    """Return the part of the page that shows the comparison."""
    loads, rate = [row["load_average"] for row in rows], f"{rows[0]['given_gflops']:g}"
    lines = []
    for row in rows:
        seconds = " | ".join(f"{row[name]:.2f}" for name in ("planned_given_s", "planned_own_s", "cpu_s", "wall_s"))
        error = "measured here" if row["error_given"] == 0 else f"{row['error_given']:+.0%}"
        lines.append(f"| {row['shape']} | {row['token_share']:.0%} | {seconds} | {error} | {row['error_own']:+.0%} |\n")
    return TEXT.format(loads=f"{min(loads):g} to {max(loads):g}", rate=rate, rows="".join(lines))


def main() -> None:
    """Measure, print one JSON line, and write what is asked for."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", help="runs with these words in their names")
    parser.add_argument("--tflops", type=float, default=0.0, help="the given rate, if the first run is not measured")
    parser.add_argument("--save", action="store_true", help="add the line to results/planner_times.jsonl")
    parser.add_argument("--write", action="store_true", help="write the page's section")
    arguments = parser.parse_args()
    with scratch() as folder:
        write_data(folder)
        large = random_qwen3(folder / "model", LARGE)
        small = model_folder(SMALL, "--model")  # task=ppo would train builtin:<name> first
        shapes = [(each.name, each, small) for each in SHAPES if each.role == ACTOR]
        shapes.append((f"{SHAPES[0].name}, 92 million parameters", SHAPES[0], large))
        chosen = [each for each in shapes if arguments.only in each[0]]
        rows = compare(chosen, folder, arguments.tflops * 1e12)
    publish("planner_times", {"shapes": rows}, arguments.save)
    if arguments.write:
        write_section(PAGE, HEADING, section(rows))


if __name__ == "__main__":
    main()
