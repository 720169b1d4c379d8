"""The planner against measured memory: six runs on this machine, each compared with its plan.

The model has 92 million parameters, so that what it takes stands out of what the libraries take. That base is measured
by the same run with `builtin:tiny`, and added to the plan of a process without the process itself. Measured is the
largest resident memory: of a rank as every run logs it (`perf/memory_gb`), of an engine as seen from outside.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from common import ROOT, Run, publish, scratch, suite_run, write_section
from gpu_rows import FLAGS, ROWS, Row
from qwen3 import SHAPES as MODELS
from qwen3 import random_qwen3
from rlhf_suite.config.declarations.runs import Run as Flags
from rlhf_suite.config.declarations.sections import section_of
from rlhf_suite.config.declarations.task_groups import TRAINED
from rlhf_suite.config.plan.run_plan import ACTOR, ENGINE
from rlhf_suite.planner.memory import GIB, GPU_PROCESS

PAGE, HEADING = ROOT / "docs" / "planner_measured.md", "## Against measured memory"
LENGTH, NUM_ROWS = 256, 8
SYNC = "weights on their way to the engines"
SFT = (
    "task=sft",
    "data.dataset={folder}/text.jsonl",
    "data.input_key=text",
    "actor.pretrain_mode_enable=true",
    "data.cache_enable=false",  # encoding takes memory, so every run does it
    "ds.param_dtype=fp32",
)
ALONE = (*SFT, "ds.zero_stage=null")
SIZES = (f"data.max_len={LENGTH}", "train.max_epochs=4", "launch.device=cpu")


@dataclass(frozen=True)
class Shape:
    """One process of a run: its name, the words of the run, and the role that is measured."""

    name: str
    words: tuple[str, ...]
    role: str = ACTOR


def micro(rows: int, ranks: int = 1) -> tuple[str, ...]:
    return f"train.micro_batch_size={rows}", f"train.batch_size={2 * rows * ranks}"


PPO = (
    "task=ppo",
    "data.prompt_dataset={folder}/prompts.jsonl",
    "data.input_key=text",
    "reward.rule=length",
    "algo.advantage.estimator=group_norm",
    "algo.kl.init_coef=0",
    "ds.zero_stage=2",
    "ds.param_dtype=fp32",
    "rollout.batch_size=2",
    "rollout.n_samples_per_prompt=2",
    *micro(2),
)
SHAPES = (
    Shape("sft, torch alone, fp32", (*ALONE, *micro(2))),
    Shape("sft, LoRA of rank 16", (*ALONE, "ds.lora.rank=16", *micro(4))),
    Shape("sft, gradient checkpointing", (*ALONE, "actor.gradient_checkpointing_enable=true", *micro(2))),
    Shape("sft, ZeRO-3 on 2 ranks", (*SFT, "ds.zero_stage=3", "actor.num_gpus_per_node=2", *micro(2, 2))),
    Shape(
        "rm, ZeRO-2, fp32",
        (
            "task=rm",
            "data.dataset={folder}/pairs.jsonl",
            "data.prompt_key=prompt",
            "data.cache_enable=false",
            "eval.dataset=null",
            "ds.zero_stage=2",
            "ds.param_dtype=fp32",
            *micro(1),
        ),
    ),
    Shape("ppo, policy under ZeRO-2, fp32", PPO),
    Shape("ppo, its engine", PPO, ENGINE),
)


def write_data(folder: Path) -> None:
    """Write rows that are nearly as long as LENGTH: the tokenizer has one token for each letter."""
    text = "abcdefg " * (LENGTH // 8 - 1)
    half = text[: LENGTH // 2 - 24]
    rows = {
        "text": {"text": text},
        "pairs": {"prompt": half, "chosen": half[:-8] + " yes", "rejected": half[:-8] + " no"},
        "prompts": {"text": half},
    }
    for name, row in rows.items():
        (folder / f"{name}.jsonl").write_text((json.dumps(row) + "\n") * NUM_ROWS)


def words_of(shape: Shape, folder: Path, model: str, steps: int = 2) -> list[str]:
    words = [word.format(folder=folder) for word in (*shape.words, *SIZES)]
    return [*words, f"train.max_steps={steps}", f"actor.model_name_or_path={model}"]


def measured(shape: Shape, folder: Path, model: str, runs: dict[Path, Run]) -> float:
    """Return the largest resident memory of a process of the shape's role in GiB; `runs` has the runs so far."""
    place = folder / f"{abs(hash(shape.words))}-{Path(model).name.removeprefix('builtin:')}"
    if place not in runs:
        runs[place] = suite_run(words_of(shape, folder, model), place)
    if shape.role == ENGINE:
        return runs[place].usage.rss_mb_of["Engine"] / 1024
    metric = "perf/actor_memory_gb" if shape.words[0] == "task=ppo" else "perf/memory_gb"
    return max(float(row[metric]) for row in runs[place].steps)


def checked(shape: Shape, folder: Path, model: str) -> Flags:
    """Return the run of a shape."""
    from rlhf_suite.composition.arguments import parse
    from rlhf_suite.preflight.jobs import preflight

    found = preflight(parse(words_of(shape, folder, model)))
    assert not found.problems, found.problems
    (run,) = found.runs
    assert run.task in TRAINED
    return run


def planned(shape: Shape, folder: Path, model: str) -> float:
    """Return what the plan says of a process, in GiB, without what its process takes before it has a model."""
    from rlhf_suite.planner.estimate import estimate
    from rlhf_suite.planner.needs import Target

    found = estimate(checked(shape, folder, model), Target(None, 1 << 40, None))
    (process,) = (each for use in found.devices for each in use.processes if each.name == shape.role)
    mapped = found.shared_memory[SYNC] if shape.role == ENGINE else 0  # resident in it, but planned under /dev/shm
    return process.memory.also(moments={SYNC: mapped}).peak / GIB


def compare(shape: Shape, folder: Path, model: str, base: float, runs: dict[Path, Run]) -> dict[str, Any]:
    """Return plan and measurement of a shape, and by how much the plan is above."""
    here, plan = measured(shape, folder, model, runs), planned(shape, folder, model)
    return {
        "shape": shape.name,
        "base_gib": round(base, 3),
        "planned_gib": round(base + plan, 3),
        "measured_gib": round(here, 3),
        "error": round((base + plan) / here - 1, 4),
        "error_without_base": round(plan / (here - base) - 1, 4),
    }


def for_an_h100(row: Row, folder: Path) -> dict[str, Any]:
    """Return what the plan says of a row of the GPU kit on an H100, and what another trainer has published."""
    from rlhf_suite.planner.devices import find_device
    from rlhf_suite.planner.estimate import estimate
    from rlhf_suite.planner.needs import Target

    model = folder / row.shape
    model.mkdir(exist_ok=True)
    config = {"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "tie_word_embeddings": True}
    (model / "config.json").write_text(json.dumps(config | MODELS[row.shape]))
    flags = {"actor.model_name_or_path": str(model), "data.max_len": row.length, "ds.lora.rank": row.lora}
    gpu = find_device("h100-80")
    found = estimate(section_of(Flags, "sft", FLAGS | flags), Target(gpu, gpu.memory, None))
    return {
        "row": row.name,
        "planned_gib": round((found.peak - GPU_PROCESS) / GIB, 1),
        "published_gib": row.published[1],
    }


def section(rows: list[dict[str, Any]], published: list[dict[str, Any]]) -> str:
    """Return the part of the page that shows the comparisons."""
    lines = [
        HEADING,
        "",
        "`python benchmarks/planner.py --save --write` writes this section. The table has the GiB of resident",
        f"memory of a process, for a model of 92 million parameters and sequences of {LENGTH} tokens. The base is the",
        "same run with `builtin:tiny`; the last column is the error without this base. The shapes were measured one",
        "after another (`--only`), at a load average of 6 to 22.",
        "",
        "| run | base | plan | measured | error | error without the base |",
        "|---|---|---|---|---|---|",
    ]
    for row in rows:
        numbers = " | ".join(f"{row[name]:.2f}" for name in ("base_gib", "planned_gib", "measured_gib"))
        lines.append(f"| {row['shape']} | {numbers} | {row['error']:+.1%} | {row['error_without_base']:+.1%} |")
    lines += [
        "",
        "While an engine loads weights, it maps them from `/dev/shm`. The plan counts them there. In this table",
        "they are added to the plan of the engine, because they are a part of its resident memory.",
        "",
        "The plan counts tensors. By default, the C library of Linux keeps the memory of freed tensors of up to 32",
        "MiB between the tensors that still exist. With this default and sequences of 512 tokens, the run with",
        "adapters needed 6.00 GiB, and the run with ZeRO-3 needed 4.84 GiB. So ranks on a CPU use another",
        "allocator, jemalloc (`launch/allocator.py`). If the package of Ray does not have jemalloc, they give freed",
        "tensors of a MiB or more back to the system (`give_back_freed_memory` in `distributed/world.py`).",
        "[performance.md](performance.md#the-allocator) has the figures of both.",
        "",
        "The next table compares plans for an H100 with the values that prime-rl has published for its own trainer.",
        "That trainer keeps other tensors, so the comparison shows only whether the order of magnitude is right.",
        "The table has the GiB that torch allocates, for one sequence in bf16 with fp32 masters, gradient",
        "checkpointing and `ds.zero_stage=null`:",
        "",
        "| row of [the GPU kit](gpu.md) | plan for this suite | published for prime-rl |",
        "|---|---|---|",
    ]
    lines += [f"| {row['row']} | {row['planned_gib']} | {row['published_gib']} |" for row in published]
    return "\n".join(lines) + "\n"


def main() -> None:
    """Measure, print one JSON line, and write what is asked for."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", help="shapes with these words in their names")
    parser.add_argument("--save", action="store_true", help="add the line to results/planner.jsonl")
    parser.add_argument("--write", action="store_true", help="write the page's section")
    arguments = parser.parse_args()
    with scratch() as folder:
        write_data(folder)
        chosen = [each for each in SHAPES if arguments.only in each.name]
        runs: dict[Path, Run] = {}
        # Before this process gets large: the kernel counts it for those that it starts.
        bases = {each.name: measured(each, folder, "builtin:tiny", runs) for each in chosen}
        model = random_qwen3(folder / "model", "qwen3-0.1b")
        rows = []
        for shape in chosen:
            rows.append(compare(shape, folder, model, bases[shape.name], runs))
            print(json.dumps(rows[-1]), flush=True)
        published = [for_an_h100(row, folder) for row in ROWS if row.published[1] is not None]
    publish("planner", {"shapes": rows, "h100": published}, arguments.save)
    if arguments.write:
        write_section(PAGE, HEADING, section(rows, published))


if __name__ == "__main__":
    main()
