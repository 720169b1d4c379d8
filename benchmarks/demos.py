"""The tasks' demos from command to end: what it cost and what it changed; writes the table in docs/demos.md.

    python benchmarks/demos.py [names] [--save] [--write]

The models that a demo starts from are warmed up first, as on a second run.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from common import RESULTS, ROOT, publish, scratch, watch

SOURCE = ROOT / "src" / "rlhf_suite" / "tasks"
# name: flags, and the metric that the demo is about
DEMOS: dict[str, tuple[list[str], str]] = {
    "sft": (["task=sft"], "train/gpt_loss"),
    "rm": (["task=rm"], "eval/acc"),
    "dpo": (["task=dpo"], "eval/acc"),
    "kto": (["task=kto"], "eval/loss"),
    "prm": (["task=prm"], "eval/acc"),
    "distill": (["task=distill"], "eval/loss"),
    "ppo": (["task=ppo"], "eval/pass1"),
    "on-policy distillation": (["task=ppo", "experiment=on_policy_distill"], "eval/pass1"),
    "generate": (["task=generate"], "samples"),
    "score": (["task=score"], "score"),
    "rejection_sampling": (["task=rejection_sampling"], "eval/pass1"),
    "iterative_dpo": (["task=iterative_dpo"], "eval/pass1"),
    "conditional_sft": (["task=conditional_sft"], "eval/pass1"),
}
PAGE = """# The demos, measured

`python benchmarks/demos.py --save --write` writes this page: demos from command to end on two CPU cores,
with the models that it starts from at hand. CPU seconds are those of all processes, Ray's daemons included.

| demo | lines of its file | command | seconds | CPU seconds | metric | first | last |
|---|---|---|---|---|---|---|---|
"""


def measure(name: str) -> dict[str, Any]:
    """One demo: its cost, and the first and last value of its metric."""
    words, metric = DEMOS[name]
    with scratch() as folder:
        usage = watch([sys.executable, str(ROOT / "run.py"), *words, f"hydra.run.dir={folder / 'run'}"], folder / "log")
        values = of_metric(folder / "run", metric)
    task = words[0].partition("=")[2]
    return {
        "demo": name,
        "command_line": " ".join(["python run.py", *words]),
        "task_file_lines": len((SOURCE / f"{task}.py").read_text().splitlines()),
        "seconds": round(usage.ended - usage.started, 1),
        "cpu_s": round(usage.cpu_between(usage.started, usage.ended), 1),
        "metric": metric,
        "first": values[0],
        "last": values[-1],
    }


def of_metric(folder: Path, metric: str) -> list[float]:
    """Every value of a metric in the run's log, or the one that it ended with."""
    log = folder / "metrics.jsonl"
    rows = [json.loads(line) for line in log.read_text().splitlines()] if log.exists() else []
    values = [row[metric] for row in rows if metric in row]
    return values or [json.loads((folder / "status.json").read_text())["metrics"][metric]]


def write_page() -> None:
    """The newest line of every demo as a table."""
    rows = [json.loads(line) for line in (RESULTS / "demos.jsonl").read_text().splitlines()]
    newest = {row["demo"]: row for row in rows}
    lines = [line(newest[name]) for name in DEMOS if name in newest]
    (ROOT / "docs" / "demos.md").write_text(PAGE + "\n".join(lines) + "\n")


def line(row: dict[str, Any]) -> str:
    cost = f"{row['task_file_lines']} | `{row['command_line']}` | {row['seconds']:.0f} | {row['cpu_s']:.0f}"
    return f"| {row['demo']} | {cost} | `{row['metric']}` | {row['first']:.3f} | {row['last']:.3f} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help=f"some of: {', '.join(DEMOS)}; none: all")
    parser.add_argument("--save", action="store_true", help="add the lines to results/demos.jsonl")
    parser.add_argument("--write", action="store_true", help="write docs/demos.md from results/demos.jsonl")
    arguments = parser.parse_args()
    for name in arguments.names or DEMOS:
        publish("demos", measure(name), arguments.save)
    if arguments.write:
        write_page()


if __name__ == "__main__":
    main()
