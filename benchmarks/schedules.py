"""What it brings to make rollouts while the policy trains: the same job with rollouts made with their steps, made ahead
of them, and as a stream of groups, one after another on the same machine.

    python benchmarks/schedules.py [--jobs compute tools] [--steps 14] [--save] [--pictures FOLDER] [--words ...]

Two jobs: `compute`, in which nothing waits; and `tools`, whose episodes have turns that an environment answers after
50 to 400 ms. How long generation takes beside training depends on the machine: with more samples it takes less,
because an engine writes few responses hardly faster than many. `--words` changes the command line of every run, so that
both take a like time in `compute`. All runs compute the same correction, which only rollouts that are
made ahead need, so that the work of a step is the same.
"""

from __future__ import annotations

import argparse
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from common import Run, publish, scratch, suite_run
from rlhf_suite.models.load import model_folder
from rlhf_suite.tasks.warm_start import warm_start

WARMUP, TAIL = 3, 3  # steps that are not counted: the last ones find their rollouts ready, since no others follow
SHARED = (
    "task=ppo data.prompt_dataset=builtin:reverse data.label_key=label eval.dataset=null eval.steps=-1 "
    "algo.advantage.estimator=rloo algo.kl.init_coef=0 correction=tis ds.param_dtype=fp32 ds.packing_samples=true "
    "train.dynamic_batch_enable=true launch.device=cpu"
)
JOBS = {
    "compute": "reward.rule=length reward.rules.length_limit=64 rollout.batch_size=6 rollout.n_samples_per_prompt=2 "
    "rollout.max_new_tokens=160 data.max_len=224 train.batch_size=12 train.max_tokens_per_gpu=2048",
    "tools": "reward.rule=null agent.kind=environment agent.max_turns=8 train.agent_func_path={here}/sleeping_tool.py "
    "rollout.batch_size=8 rollout.n_samples_per_prompt=8 rollout.max_new_tokens=96 data.max_len=128 "
    "train.batch_size=64 train.max_tokens_per_gpu=4096",
}
ASYNC = "train.async_enable=true train.async_queue_size={bound}"
MODES = {
    "synchronous": "",
    "ahead": ASYNC.format(bound=1),
    "stream": f"{ASYNC.format(bound=4)} train.partial_rollout_enable=true train.async_run_ahead={{depth}}",
}
DEPTH = 2


def words(job: str, mode: str, steps: int, more: Sequence[str]) -> list[str]:
    """The command line of one run."""
    line = JOBS[job].format(here=Path(__file__).parent)
    line = f"{SHARED} {line} {MODES[mode].format(depth=DEPTH)} train.max_steps={steps}"
    return [*line.split(), f"actor.model_name_or_path={model(job)}", *more]


def model(job: str) -> str:
    """One that is large enough that its steps are long, or one that ends its turns, since it has learnt to."""
    name = "builtin:small" if job == "compute" else warm_start("builtin:tiny", prompts="builtin:reverse")
    return model_folder(name, "the model")


def measured(run: Run) -> dict[str, Any]:
    """The speed of one run, and who was idle."""
    rows = run.steps[:-TAIL]
    begin, end = run.steps[WARMUP - 1]["time"], rows[-1]["time"]
    rows = rows[WARMUP:]
    names = ("perf/overlap", "perf/engine_idle", "perf/trainer_idle", "async/staleness_mean")
    found = {name.partition("/")[2]: round(float(np.mean([row.get(name, 0.0) for row in rows])), 3) for name in names}
    cpu = run.usage.cpu_by_name(begin, end)
    return {
        "steps_per_s": round(len(rows) / (end - begin), 3),
        "load_average": round(psutil.getloadavg()[0], 1),
        **found,
        "driver_idle": round(1 - cpu.get("run.py", 0.0) / (end - begin), 3),
        "cpu_s_per_step": round(sum(cpu.values()) / len(rows), 2),
        "response_length": round(float(np.mean([row["train/response_length"] for row in rows])), 1),
        "phase_s": {
            name.partition("/")[2]: round(float(np.mean([row.get(name, 0.0) for row in rows])), 3)
            for name in sorted({name for row in rows for name in row if name.startswith("timing/")})
        },
    }


def main() -> None:
    """Run all and print one JSON line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--jobs", nargs="+", default=[*JOBS], choices=[*JOBS])
    parser.add_argument("--modes", nargs="+", default=[*MODES], choices=[*MODES])
    parser.add_argument("--steps", type=int, default=14)
    parser.add_argument("--pictures", type=Path, help="a folder for the timeline of each run")
    parser.add_argument("--words", nargs="+", default=[], help="more words for the command line of every run")
    parser.add_argument("--save", action="store_true", help="add the line to results/schedules.jsonl")
    given = parser.parse_args()
    result: dict[str, Any] = {}
    with scratch() as root:
        for job in given.jobs:
            found = {}
            for mode in given.modes:
                folder = root / f"{job}_{mode}"
                found[mode] = measured(suite_run(words(job, mode, given.steps, given.words), folder))
                if given.pictures:
                    given.pictures.mkdir(parents=True, exist_ok=True)
                    shutil.copy(folder / "timeline.png", given.pictures / f"{folder.name}.png")
                    shutil.copy(folder / "timeline.jsonl", given.pictures / f"{folder.name}.jsonl")
                    shutil.copy(folder / "metrics.jsonl", given.pictures / f"{folder.name}.metrics.jsonl")
            plain = found.get("synchronous", {}).get("steps_per_s")
            ratios = {
                f"{mode}_to_synchronous": round(each["steps_per_s"] / plain, 2) for mode, each in found.items() if plain
            }
            ratios.pop("synchronous_to_synchronous", None)
            result[job] = ratios | found
    publish("schedules", {"steps": given.steps, "words": given.words, **result}, given.save)


if __name__ == "__main__":
    main()
