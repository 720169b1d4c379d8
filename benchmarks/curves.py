"""Whether reinforcement learns: three toy tasks x six algorithms, the default job with each estimator, adapters against
full fine-tuning, a teacher beside rewards, and a hybrid model.

    python benchmarks/curves.py [words] [--again] [--write]

Runs every job that results/curves.jsonl does not have (with words: of those whose command has one of them; --again:
also those that it has), adds a line for each, then with --write docs/benchmarks.md and docs/learning_curves.png. Jobs
that compose to the same configuration are one run. The models that a job starts from are warmed up first, as on a
second run.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import curves_page
from common import RESULTS, ROOT, publish, scratch, suite_run
from rlhf_suite.composition.arguments import parse
from rlhf_suite.preflight.jobs import preflight
from rlhf_suite.registry import estimator
from rlhf_suite.tasks.warm_start import warm_start

TASKS = {
    "reverse": [],
    "sort": ["data.prompt_dataset=builtin:sort", "eval.dataset=builtin:sort_eval"],
    # as many steps as the others take in one pass over their prompts, of which there are fewer
    "addition": ["data.prompt_dataset=builtin:addition", "eval.dataset=builtin:addition_eval", "train.max_steps=32"],
}
ALGORITHMS = {
    "ppo": "PPO (GAE)",
    "reinforce_baseline": "REINFORCE++-baseline",
    "rloo": "RLOO",
    "grpo": "GRPO",
    "dr_grpo": "Dr. GRPO",
    "gspo": "GSPO",
}
PAGE_FILE = ROOT / "docs" / "benchmarks.md"
Panels = dict[str, dict[str, dict[str, Any]]]  # task: algorithm: its line
DEFAULT = ["task=ppo"]
MODEL = "actor.model_name_or_path="


@dataclass(frozen=True)
class Job:
    """A row of one of the page's tables."""

    task: str  # of TASKS
    name: str  # an algorithm or an estimator
    words: tuple[str, ...]

    @property
    def command(self) -> str:
        return " ".join(["python run.py", *self.words])


ESTIMATOR_JOBS = [
    Job("reverse", name, (*DEFAULT, f"algo.advantage.estimator={name}"))
    for name in estimator.that_need("rewards")
    if not estimator.needs(name, "parts")  # of the reward, of which the default job has none
]
ALGORITHM_JOBS = [
    Job(task, name, (*DEFAULT, f"experiment={name}", *data)) for task, data in TASKS.items() for name in ALGORITHMS
]
GRPO = (*DEFAULT, "experiment=grpo")
MODEL_JOBS = [
    Job("reverse", "`builtin:tiny`, all weights", GRPO),
    Job("reverse", "`builtin:tiny`, LoRA", (*GRPO, "ds.lora.rank=32", "ds.lora.alpha=32", "actor.adam.lr=1.5e-3")),
    Job("reverse", "`builtin:tiny`, with a teacher", (*GRPO, "algo.distill.coef=0.1")),
    Job("reverse", "`builtin:hybrid`, all weights", (*GRPO, "demo=ppo", f"{MODEL}builtin:hybrid")),
]


@cache
def composed() -> dict[Job, Job]:
    """Each job and the first that composes to the same configuration."""
    first: dict[str, Job] = {}
    return {job: first.setdefault(configuration(job), job) for job in (*ESTIMATOR_JOBS, *ALGORITHM_JOBS, *MODEL_JOBS)}


def configuration(job: Job) -> str:
    """What a job's words compose to."""
    found = preflight(parse(list(job.words)))
    assert not found.problems, found.problems
    return repr(found.runs[0])


def known() -> dict[str, dict[str, Any]]:
    """The newest line of every command that has run."""
    path = RESULTS / "curves.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    return {row["command_line"]: row for row in rows}


def measure(job: Job) -> dict[str, Any]:
    """Run it: what it cost, and every evaluation."""
    model = next((word.partition("=")[2] for word in job.words if word.startswith(MODEL)), "builtin:tiny")
    warm_start(model, prompts=f"builtin:{job.task}")
    with scratch() as folder:
        usage = suite_run(job.words, folder / "run").usage
        rows = [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]
    points = [[row["step"], row["eval/pass1"], row["eval/pass1_stderr"]] for row in rows if "eval/pass1" in row]
    values = [value for _, value, _ in points]
    return {
        "task": job.task,
        "name": job.name,
        "command_line": job.command,
        "first": values[0],
        "last": values[-1],
        "best": max(values),
        "mismatch": max(row["mismatch/mean"] for row in rows if "mismatch/mean" in row),
        "bytes_of_a_sync": next(row["sync/bytes"] for row in rows if "sync/bytes" in row),
        "seconds": round(usage.ended - usage.started, 1),
        "cpu_s": round(usage.cpu_between(usage.started, usage.ended), 1),
        "points": points,
    }


def run(words: Sequence[str], again: bool) -> None:
    """Run the jobs that are asked for and have no line, or all that are asked for."""
    for job in dict.fromkeys(composed().values()):
        if (again or job.command not in known()) and (not words or any(word in job.command for word in words)):
            publish("curves", measure(job), save=True)


def tables() -> tuple[Panels, list[dict[str, Any]], dict[str, dict[str, Any]]]:
    """Return the rows of the three tables, of the jobs that have run."""
    rows, run_as = known(), {job: first.command for job, first in composed().items()}
    panels: Panels = {task: {} for task in TASKS}
    for job in ALGORITHM_JOBS:
        if run_as[job] in rows:
            panels[job.task][job.name] = rows[run_as[job]]
    estimators = [rows[run_as[job]] for job in ESTIMATOR_JOBS if run_as[job] in rows]
    models = {job.name: rows[run_as[job]] for job in MODEL_JOBS if run_as[job] in rows}
    return panels, estimators, models


def page() -> str:
    """Return docs/benchmarks.md."""
    panels, estimators, models = tables()
    return curves_page.page(panels, ALGORITHMS, TASKS, estimators, models)


def write() -> None:
    """Write the page and the picture."""
    PAGE_FILE.write_text(page())
    panels, _, _ = tables()
    curves_page.draw(panels, ALGORITHMS, ROOT / "docs" / "learning_curves.png")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("words", nargs="*", help="only jobs whose command has one of them")
    parser.add_argument("--again", action="store_true", help="also jobs that have a line")
    parser.add_argument("--write", action="store_true", help="write docs/benchmarks.md and docs/learning_curves.png")
    arguments = parser.parse_args()
    run(arguments.words, arguments.again)
    if arguments.write:
        write()


if __name__ == "__main__":
    main()
