"""The default layout (packed rows) beside padded rows and TRL, on the same rows in the same steps, one after the other
in rounds: `python benchmarks/beside_trl.py --trl <python of an environment with TRL>`. README.md says how it is made.

A GRPO step has 8 prompts with 8 samples each, which TRL has written by transformers and the suite by vLLM. In `grpo`
prompts have the lengths of other rows, and responses end by chance, after 64 tokens in the mean and at most 256; in
`grpo_equal` prompts are short and each response has 128 tokens.

Every measurement is a line; the table at the end has the medians over the rounds: tokens per CPU second, or with
`--device cuda` per second, and the most memory of the run's processes, or of the GPU.
"""

from __future__ import annotations

import argparse
import copy
import json
import math
import os
import random
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import ppo
import supervised
from common import MODELS, ROOT, Run, common_arguments, model_of, publish, scratch, watch
from ending_model import ending_model

GRPO = ("grpo", "grpo_equal")
TASKS = ("sft", "rm", "dpo", "kto", *GRPO)
NEW_TOKENS = {"grpo": 256, "grpo_equal": 128}  # of a response, at most
MEAN_LENGTH = 64  # of a response that ends by chance
WAYS = ("default", "padded", "TRL")
SAMPLES = 8  # of a prompt of GRPO
Line = dict[str, Any]


def main() -> None:
    """Measure each way in each round, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    common_arguments(parser)
    parser.add_argument("--trl", required=True, help="the python of an environment that has TRL")
    parser.add_argument("--tasks", nargs="*", choices=TASKS, default=TASKS)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--lengths", type=int, nargs=2, default=(20, 300), help="shortest and longest, in characters")
    parser.add_argument("--ways", nargs="*", choices=WAYS, default=WAYS)
    parser.add_argument(
        "--recompute", action="store_true", help="recompute activations in the backward pass, in all ways"
    )
    parser.add_argument("--save", action="store_true", help="add the lines to results/beside_trl.jsonl")
    arguments = parser.parse_args()
    if arguments.recompute:
        arguments.set = [*arguments.set, "actor.gradient_checkpointing_enable=true"]
    found: dict[tuple[str, str], list[Line]] = {}
    for task in arguments.tasks:
        for _ in range(arguments.rounds):
            for way in arguments.ways:
                if task in GRPO and way == "padded":
                    continue
                row = measure(arguments, task, way)
                line = {"task": task, "way": way, "device": arguments.device, "recompute": arguments.recompute}
                publish("beside_trl", line | row, arguments.save)
                found.setdefault((task, way), []).append(row)
    is_gpu = arguments.device == "cuda"
    rate, memory = ("tokens_per_s", "peak_gpu_mb") if is_gpu else ("tokens_per_cpu_s", "peak_pss_mb")
    print(table(found, rate, memory, arguments.ways))


def table(found: dict[tuple[str, str], list[Line]], rate: str, memory: str, ways: Sequence[str]) -> str:
    """Return the medians of a rate and of the memory, and those of the first way over those of each other."""
    head = [f"{way}: tokens/s, GB | {ways[0]} / {way}: speed, memory" for way in ways]
    lines = [f"| task | {' | '.join(head)} |", "|---" * (1 + 2 * len(ways)) + "|"]
    for task in dict.fromkeys(task for task, _ in found):
        pairs = [tuple(median(found.get((task, way), []), name) for name in (rate, memory)) for way in ways]
        cells = [
            f"{speed:,.0f}, {held / 1024:.1f} | {pairs[0][0] / speed:.2f} x, {pairs[0][1] / held:.2f} x"
            for speed, held in pairs
        ]
        lines.append(f"| {task} | {' | '.join(cells)} |")
    return "\n".join(lines)


def median(rows: list[Line], name: str) -> float:
    """Return the median of a figure; NaN if each run failed."""
    return statistics.median([row[name] for row in rows if name in row] or [math.nan])


def measure(arguments: argparse.Namespace, task: str, way: str) -> Line:
    """Return what one run comes to; under `error` why it came to nothing, which memory may be."""
    one = copy.copy(arguments)
    one.task, one.mode, one.cached, one.budget = task, way, False, supervised.FULL
    try:
        if task in GRPO:
            return measure_grpo(one, way)
        one.batch = supervised.TASKS[task].batch
        return measure_trl(one) if way == "TRL" else supervised.measure(one)
    except RuntimeError as error:
        print(error, file=sys.stderr)
        return {"error": str(error).splitlines()[-1]}


def measure_trl(arguments: argparse.Namespace) -> Line:
    """Return what a run of TRL comes to, on the rows of each step of the suite."""
    from rlhf_suite.data.sampler import BatchOrder

    model, batch, warmup = model_of(arguments), arguments.batch, arguments.warmup
    with scratch() as folder:
        rows = supervised.write_rows(folder / "rows.jsonl", arguments)
        arguments.mode = "default"
        command = supervised.flags(arguments, model, folder / "rows.jsonl")
        tokens = supervised.step_tokens(rows, command, arguments)
        order = BatchOrder(len(rows), batch, supervised.SEED)
        ordered = [rows[index] for step in range(arguments.steps) for index in order.indices(step)]
        (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ordered))
        run = trl_run(arguments, folder, batch, arguments.lengths[1] + 1)
    return run.rates(warmup, sum(tokens[warmup:]), batch * (arguments.steps - warmup))


def measure_grpo(arguments: argparse.Namespace, way: str) -> Line:
    """Return what steps of GRPO come to."""
    from rlhf_suite.data.builtin import reverse

    arguments.samples, arguments.new_tokens = SAMPLES, NEW_TOKENS[arguments.task]
    number = ppo.PROMPTS * arguments.steps
    if arguments.task == "grpo":
        name = f"{arguments.shape or arguments.model.replace(':', '-')}-ending"
        arguments.model, arguments.shape = ending_model(MODELS / name, model_of(arguments), MEAN_LENGTH), None
        rng = random.Random(supervised.SEED)
        prompts = [supervised.text(rng, rng.randint(*arguments.lengths)) for _ in range(number)]
    else:
        prompts = [reverse(row)[0] for row in range(number)]
    with scratch() as folder:
        arguments.prompts = folder / "rows.jsonl"
        rows = [{"input": prompt, "prompt": prompt, "label": "-"} for prompt in prompts]
        arguments.prompts.write_text("".join(json.dumps(row) + "\n" for row in rows))
        if way != "TRL":
            return ppo.grpo(arguments)
        samples, warmup = ppo.PROMPTS * SAMPLES, arguments.warmup
        run = trl_run(arguments, folder, samples, arguments.new_tokens)
    counted = sum(ppo.new_tokens(row, samples) for row in run.steps[warmup:])
    return run.rates(warmup, counted, samples * (arguments.steps - warmup))


def trl_run(arguments: argparse.Namespace, folder: Path, batch: int, longest: int) -> Run:
    """Train by TRL on the rows.jsonl of a folder."""
    (folder / "run").mkdir()
    os.environ["OMP_NUM_THREADS"] = "1"  # as a process of the suite
    words = [arguments.trl, ROOT / "benchmarks" / "trl_run.py", arguments.task.partition("_")[0], model_of(arguments)]
    words += [folder / "rows.jsonl", folder / "run", batch, longest, arguments.device]
    words += ["recompute"] if arguments.recompute else []
    usage = watch([str(word) for word in words], folder / "run.log")
    return Run(usage, [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()])


if __name__ == "__main__":
    main()
