"""How fast the supervised tasks train: sequences of uniformly random length, four ways to lay them out.

default       what a command line without flags of the layout does: packed rows, micro-batches by a token budget
padded        one right-padded micro-batch
packed        the same sequences end to end, nothing padded
packed_full   micro-batches filled to a token budget, whatever their number of sequences

Tokens are those of the sequences that are trained on, each counted once, whatever else runs over them: both answers of
a pair (rm, dpo), the answers as they were given (kto), the student's (distill). The first half of a sequence is its
prompt but for sft, which trains on every token.
"""

from __future__ import annotations

import argparse
import json
import os
import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from common import common_arguments, model_of, publish, scratch, suite_run

SEED = 0
LETTERS = "abcdefghijklmnopqrstuvwxyz "
FULL = 2048  # tokens of a filled micro-batch
STEP_OF_SOLUTION = 20  # characters

Row = dict[str, Any]


def main() -> None:
    """Train for a few steps and print one JSON line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    common_arguments(parser)
    parser.add_argument("--task", choices=TASKS, default="sft")
    parser.add_argument("--mode", choices=("default", "padded", "packed", "packed_full"), default="packed")
    parser.add_argument("--batch", type=int, help="rows per optimiser step; by default 8 pairs or 16 of anything else")
    parser.add_argument("--lengths", type=int, nargs=2, default=(20, 300), help="shortest and longest, in characters")
    parser.add_argument("--budget", type=int, default=FULL, help="tokens of a micro-batch with packed_full")
    parser.add_argument("--cached", action="store_true", help="dpo, kto: the reference's log-probs before training")
    parser.add_argument("--save", action="store_true", help="add the line to results/<task>.jsonl")
    arguments = parser.parse_args()
    arguments.batch = arguments.batch or TASKS[arguments.task].batch
    publish(arguments.task, measure(arguments), arguments.save)


# Rows of one token per character with the builtin tokenizer.


def text(rng: random.Random, length: int) -> str:
    return "".join(rng.choices(LETTERS, k=length))


def plain_row(rng: random.Random, length: int) -> Row:
    return {"input": text(rng, length)}


def answer_row(rng: random.Random, length: int) -> Row:
    prompt = length // 2
    return {"input": text(rng, prompt), "output": text(rng, length - prompt), "label": rng.randint(0, 1)}


def pair_row(rng: random.Random, length: int) -> Row:
    prompt = length // 2
    return {
        "prompt": text(rng, prompt),
        "chosen": text(rng, length - prompt),
        "rejected": text(rng, length - prompt),
    }


def solution_row(rng: random.Random, length: int) -> Row:
    steps = max(1, length // STEP_OF_SOLUTION)
    solution = "".join(text(rng, length // steps - 1) + ";" for _ in range(steps))
    return {"input": solution, "label": [rng.choice("+-") for _ in range(steps)]}


@dataclass(frozen=True)
class Workload:
    """What a task is measured on. `flags` of the suite may name {model}, the folder of the trained model."""

    batch: int
    row: Callable[[random.Random, int], Row]
    flags: tuple[str, ...]


PAIRS = ("data.prompt_key=prompt", "data.input_template=null")
TASKS = {
    "sft": Workload(16, plain_row, ("actor.pretrain_mode_enable=true", "data.input_template=null")),
    "rm": Workload(8, pair_row, PAIRS),
    "dpo": Workload(8, pair_row, PAIRS),
    "kto": Workload(16, answer_row, ("data.input_template=null",)),
    "prm": Workload(16, solution_row, ("algo.placeholder_token=';'", "algo.reward_tokens=['+','-']")),
    "distill": Workload(
        16, answer_row, ("data.output_key=output", "data.input_template=null", "teacher.model_name_or_path={model}")
    ),
}


def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    """One run, and what it comes to per second and per CPU second."""
    model, warmup = model_of(arguments), arguments.warmup
    with scratch() as folder:
        os.environ["XDG_CACHE_HOME"] = str(folder / "cache")  # no annotations of an earlier run
        rows = write_rows(folder / "rows.jsonl", arguments)
        command = flags(arguments, model, folder / "rows.jsonl")
        run = suite_run(command, folder / "run")
    tokens = step_tokens(rows, command, arguments)
    counted, samples = sum(tokens[warmup:]), arguments.batch * (arguments.steps - warmup)
    loss = "train/gpt_loss" if arguments.task == "sft" else "train/loss"
    return {
        "mode": arguments.mode + (", cached" if arguments.cached else ""),
        **run.rates(warmup, counted, samples),
        "final_loss": run.steps[-1][loss],
        "config": {
            "model": arguments.shape or arguments.model,
            "device": arguments.device,
            "dtype": arguments.dtype,
            "batch": arguments.batch,
            "lengths": list(arguments.lengths),
            "steps": arguments.steps,
            "tokens": counted,
        },
    }


def flags(arguments: argparse.Namespace, model: str, rows: Path) -> list[str]:
    """The command line of the run."""
    layout = {
        "default": [],
        "padded": ["ds.packing_samples=false", f"train.micro_batch_size={arguments.batch}"],
        "packed": ["ds.packing_samples=true", f"train.micro_batch_size={arguments.batch}"],
        "packed_full": [
            "ds.packing_samples=true",
            "train.dynamic_batch_enable=true",
            f"train.max_tokens_per_gpu={arguments.budget}",
        ],
    }
    return [
        f"task={arguments.task}",
        f"actor.model_name_or_path={model}",
        f"data.dataset={rows}",
        f"data.max_len={arguments.lengths[1] + 1}",
        f"train.batch_size={arguments.batch}",
        "train.max_epochs=1",
        f"train.seed={SEED}",
        f"ds.param_dtype={arguments.dtype}",
        f"launch.device={arguments.device}",
        *(flag.replace("{model}", model) for flag in TASKS[arguments.task].flags),
        *layout[arguments.mode],
        *(["ref.cache_enable=true"] if arguments.cached else []),
        *arguments.set,
    ]


def write_rows(path: Path, arguments: argparse.Namespace) -> list[Row]:
    """The rows of the run."""
    rng, row = random.Random(SEED), TASKS[arguments.task].row
    rows = [row(rng, rng.randint(*arguments.lengths)) for _ in range(arguments.batch * arguments.steps)]
    path.write_text("".join(json.dumps(each) + "\n" for each in rows), encoding="utf-8")
    return rows


def step_tokens(rows: list[Row], command: list[str], arguments: argparse.Namespace) -> list[int]:
    """Tokens of each optimiser step, as the task encodes its rows."""
    import importlib

    from rlhf_suite.composition.arguments import parse
    from rlhf_suite.data.row import Row as DataRow
    from rlhf_suite.data.sampler import BatchOrder
    from rlhf_suite.models.load import load_tokenizer
    from rlhf_suite.preflight.jobs import preflight

    (config,) = preflight(parse(command)).runs
    make_task = importlib.import_module(f"rlhf_suite.tasks.{arguments.task}").make_task
    task = make_task(config, load_tokenizer(config.actor.model_name_or_path, config.data))
    encoded = (task.encoder.encode(DataRow(row, "rows", line)) for line, row in enumerate(rows))
    lengths = [len(item[0] if isinstance(item, list) else item) for item in encoded]  # a text has one window
    order = BatchOrder(len(rows), arguments.batch, SEED)
    return [sum(lengths[i] for i in order.indices(step)) for step in range(arguments.steps)]


if __name__ == "__main__":
    main()
