"""The tasks' demos from command to end: what it cost and what it changed; writes the table in docs/demos.md.

    python benchmarks/demos.py [names] [--save] [--write]

With only --write, no demo runs: the page is written from the lines that exist. The models that a demo starts from are
warmed up first, as on a second run.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from common import RESULTS, ROOT, publish, scratch, watch


@dataclass(frozen=True)
class Demo:
    """A command, the metric it is about, and which rows of two other pages are about its numbers (regular expressions;
    none for what trains nothing)."""

    flags: tuple[str, ...]
    metric: str
    losses: str = ""  # in docs/gradient_equality.md
    references: str = ""  # in docs/oracles.md


SFT, DPO = ("sft", ".*/(gpt_lm_loss|sft_loss/.*)"), ("dpo .*", ".*/dpo/.*")
RL_LOSSES = "(ppo|gspo|cispo|sapo|reinforce|value|next token).*"
RL_REFERENCES = ".*/(advantage|policy_loss|value_loss|ppo_losses|kl|agg|compute_reward|adaptive_kl|entropy|logprobs).*"
DEMOS = {
    "sft": Demo(("task=sft",), "train/gpt_loss", *SFT),
    "rm": Demo(("task=rm",), "eval/acc", "rm .*", ".*/rm/.*"),
    "dpo": Demo(("task=dpo",), "eval/acc", *DPO),
    "kto": Demo(("task=kto",), "eval/auc", "kto.*", ".*/kto.*"),
    "prm": Demo(("task=prm",), "eval/acc", "prm.*", ".*/prm/.*"),
    "distill": Demo(("task=distill",), "eval/loss", "distill .*", ".*/(kd|distill/.*)"),
    "ppo": Demo(("task=ppo",), "eval/pass1", RL_LOSSES, RL_REFERENCES),
    "on-policy distillation": Demo(
        ("task=ppo", "experiment=on_policy_distill"), "eval/pass1", ".*, on_policy_distill", ".*/(kl/.*|logprobs)"
    ),
    "generate": Demo(("task=generate",), "samples"),
    "score": Demo(("task=score",), "score"),
    "rejection_sampling": Demo(("task=rejection_sampling",), "eval/pass1", *SFT),
    "iterative_dpo": Demo(("task=iterative_dpo",), "eval/pass1", *DPO),
    "conditional_sft": Demo(("task=conditional_sft",), "eval/pass1", *SFT),
}
PAGE_FILE = ROOT / "docs" / "demos.md"
PAGE = """# The demos, measured

`python benchmarks/demos.py --save --write` writes this page. Each demo was run as a whole on two CPU cores. The
models from which it starts existed already. CPU seconds are those of all processes, including the daemons of Ray. The
machine had other work (`benchmarks/results/demos.jsonl` has the load averages), so seconds are upper bounds. The
first and last values are those of one processor. Others round differently: `python run.py task=ppo` ended between 0.87
and 0.93 on the processors that we tried.

The gradient error is the largest error of the task's losses in [gradient_equality.md](gradient_equality.md), relative
to the formula in float64, over all splits of a step. The oracle error is the largest difference from other systems in
[oracles.md](oracles.md), apart from intended differences. A loop has the errors of the task that trains its models.

| demo | command | seconds | CPU seconds | metric | first | last | gradient error | oracle error |
|---|---|---|---|---|---|---|---|---|
"""


def measure(name: str) -> dict[str, Any]:
    """One demo: its cost, and the first and last value of its metric."""
    words, metric = DEMOS[name].flags, DEMOS[name].metric
    with scratch() as folder:
        usage = watch([sys.executable, str(ROOT / "run.py"), *words, f"hydra.run.dir={folder / 'run'}"], folder / "log")
        values = of_metric(folder / "run", metric)
    return {
        "demo": name,
        "command_line": " ".join(["python run.py", *words]),
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


def page() -> str:
    """Return docs/demos.md: the newest line of every demo as a table."""
    rows = [json.loads(line) for line in (RESULTS / "demos.jsonl").read_text().splitlines()]
    newest = {row["demo"]: row for row in rows}
    lines = [line(newest[name]) for name in DEMOS if name in newest]
    return PAGE + "\n".join(lines) + "\n"


def line(row: dict[str, Any]) -> str:
    cost = f"`{row['command_line']}` | {row['seconds']:.0f} | {row['cpu_s']:.0f}"
    demo = DEMOS[row["demo"]]
    errors = f"{worst('gradient_equality', demo.losses)} | {worst('oracles', demo.references)}"
    return f"| {row['demo']} | {cost} | `{row['metric']}` | {row['first']:.3f} | {row['last']:.3f} | {errors} |"


def worst(page: str, pattern: str) -> str:
    """The largest number of the rows of a page's tables that match; `oracles.md` has it in the second column, the other
    page in all of them."""
    if not pattern:
        return ""
    numbers: list[float] = []
    for row in (ROOT / "docs" / f"{page}.md").read_text().splitlines():
        name, *cells = (cell.strip(" `") for cell in row.strip("|").split("|"))
        if row.startswith("| ") and re.fullmatch(pattern, name):
            numbers += [float(cell) for cell in (cells[:1] if page == "oracles" else cells) if cell]
    if not numbers:
        raise ValueError(f"no row of docs/{page}.md matches {pattern!r}")
    return f"{max(numbers):.1e}".replace("e-0", "e-")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help=f"some of: {', '.join(DEMOS)}; none: all")
    parser.add_argument("--save", action="store_true", help="add the lines to results/demos.jsonl")
    parser.add_argument("--write", action="store_true", help="write docs/demos.md from results/demos.jsonl")
    arguments = parser.parse_args()
    only_write = arguments.write and not arguments.save and not arguments.names
    for name in () if only_write else arguments.names or DEMOS:
        publish("demos", measure(name), arguments.save)
    if arguments.write:
        PAGE_FILE.write_text(page())


if __name__ == "__main__":
    main()
