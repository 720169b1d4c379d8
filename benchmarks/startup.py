"""How long things take that train nothing, what they import, and how long until the first step of a run.

help, cfg, mistake   `--help`, `--cfg job`, and a command line with a typo: wall and CPU seconds
sft, ppo             command to the beginning of the first step, with the tiny builtin model
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil

from common import ROOT, model_of, publish, scratch, suite_run

HEAVY = ("torch", "transformers", "deepspeed", "ray", "vllm", "datasets", "pandas", "pyarrow", "matplotlib", "peft")
QUICK = {
    "help": ["task=ppo", "--help"],
    "cfg": ["task=ppo", "--cfg", "job"],
    "mistake": ["task=ppo", "rollout.batchsize=3"],
}
# Runs main() and leaves on the last line of stderr which of the heavy packages it has imported.
PROBE = """
import json, sys
from rlhf_suite.cli import main
sys.argv = ["run.py", *sys.argv[2:]]
try:
    main()
finally:
    print(json.dumps([name for name in {heavy} if name in sys.modules]), file=sys.stderr)
"""


def main() -> None:
    """Measure and print one JSON line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="only what trains nothing")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--save", action="store_true", help="add the line to results/startup.jsonl")
    arguments = parser.parse_args()
    result: dict[str, Any] = {name: quick(words) for name, words in QUICK.items()}
    if not arguments.quick:
        arguments.shape, arguments.model = None, "builtin:tiny"
        model = model_of(arguments)
        result |= {task: first_step(flags, model, arguments.device) for task, flags in JOBS.items()}
    publish("startup", result, arguments.save)


JOBS = {
    "sft": [
        "task=sft",
        "data.dataset=builtin:reverse",
        "data.output_key=output",
        "data.input_template=null",
        "train.max_steps=2",
    ],
    "ppo": [
        "task=ppo",
        "data.prompt_dataset=builtin:reverse",
        "data.label_key=label",
        "reward.rule=exact_match",
        "algo.advantage.estimator=group_norm",
        "algo.kl.init_coef=0",
        "rollout.batch_size=8",
        "rollout.n_samples_per_prompt=8",
        "rollout.max_new_tokens=8",
        "train.batch_size=64",
        "train.micro_batch_size=64",
        "rollout.micro_batch_size=64",
        "train.max_steps=2",
    ],
}


def quick(words: list[str]) -> dict[str, Any]:
    """Wall and CPU seconds of a command, and the heavy packages it imported."""
    command = [sys.executable, "-c", PROBE.replace("{heavy}", repr(HEAVY)), "--", *words]
    with scratch() as folder:
        # An installed package has its compiled modules, so the first of two runs compiles them.
        environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
        environment["PYTHONPYCACHEPREFIX"] = str(folder)
        for _ in range(2):
            before, began = children_cpu_s(), time.perf_counter()
            done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
            wall_s = time.perf_counter() - began
    return {
        "wall_s": round(wall_s, 2),
        "cpu_s": round(children_cpu_s() - before, 2),
        "imported": json.loads(done.stderr.splitlines()[-1]),
    }


def children_cpu_s() -> float:
    """CPU seconds of all children that have ended."""
    times = psutil.Process().cpu_times()
    return times.children_user + times.children_system


def first_step(flags: list[str], model: str, device: str) -> dict[str, Any]:
    """A job of two steps."""
    common = [
        f"actor.model_name_or_path={model}",
        "data.max_len=64",
        "ds.packing_samples=true",
        "ds.param_dtype=fp32",
        f"launch.device={device}",
    ]
    with scratch() as folder:
        run = suite_run([*flags, *common], Path(folder) / "run")
    begin, end = run.usage.started, run.usage.started + run.startup_s
    busy = {name: round(value, 2) for name, value in run.usage.cpu_by_name(begin, end).items() if value > 0.2}
    return {
        "startup_s": round(run.startup_s, 1),
        "startup_cpu_s": round(run.usage.cpu_between(begin, end), 1),
        "startup_cpu_s_of": busy,
        "shutdown_s": round(run.usage.ended - run.steps[-1]["time"], 1),
        "peak_rss_mb": round(run.usage.peak_rss_mb),
        "peak_pss_mb": round(run.usage.peak_pss_mb),
    }


if __name__ == "__main__":
    main()
