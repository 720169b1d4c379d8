"""What the loops share: answer prompts, select of the answers, train on what is selected, measure; again and again.

A loop says how it selects and what it trains (`Recipe`). Stages: `iter_<i>/generate`, `iter_<i>/<trained>`, and with
held-out prompts `evaluate_<i>`, the model after i iterations.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from rlhf_suite.config.loop_stages import Share, evaluate_run, generate_run
from rlhf_suite.config.runs import LoopRun, SupervisedRun
from rlhf_suite.data.answer_groups import Answers, answer_groups, read_lines
from rlhf_suite.data.row_range import prompt_rows
from rlhf_suite.errors import RunError, UserError
from rlhf_suite.tasks.stages import Stages, stages
from rlhf_suite.tasks.warm_start import warm_started
from rlhf_suite.train.metrics import MetricLogger
from rlhf_suite.train.run_folder import RunFolder

COLUMNS = {
    "eval/pass1": "pass@1",
    "eval/reward": "held-out reward",
    "train/reward": "reward of its answers",
    "loop/rows": "rows trained on",
    "loop/dropped": "prompts dropped",
}
ANSWERS = "generations.jsonl"  # of a stage of task=generate


@dataclass(frozen=True)
class Recipe:
    """`select`: a row to train on of a prompt's answers, or why there is none. `train`: the run that trains a model on
    such rows, from (model, rows, output folder)."""

    trained: str
    select: Callable[[Answers], dict[str, Any] | str]
    train: Callable[[str, Path, str | None], SupervisedRun]


@dataclass
class Loop:
    """One loop in its folder."""

    config: LoopRun
    steps: Stages
    recipe: Recipe
    sinks: MetricLogger
    metrics: list[dict[str, float]] = field(default_factory=list)  # by iteration

    def run(self, model: str) -> dict[str, float]:
        """All iterations, from `model`; returns the last metrics."""
        shares = shares_of(self.config)
        self.evaluate(0, model)
        for iteration, share in enumerate(shares):
            rows = self.select(iteration, model, share)
            model = self.train(iteration, model, rows, is_last=iteration == len(shares) - 1)
            self.evaluate(iteration + 1, model)
        return {name: value for metrics in self.metrics for name, value in metrics.items()}

    def select(self, iteration: int, model: str, share: Share) -> Path:
        """The rows to train on: of the answers to the iteration's prompts."""
        self.say(iteration, f"answering {share.count} prompts")
        stage = self.steps.run(f"iter_{iteration}/generate", generate_run(self.config, model, iteration, share))
        groups = answer_groups(stage.path / ANSWERS, self.config.data.input_key)
        rows, dropped = selected(map(self.recipe.select, groups))
        metrics = stage.status()["metrics"]
        self.log(iteration, {"train/reward": metrics["score"], "loop/rows": len(rows), "loop/dropped": dropped.total()})
        reasons = "".join(f"; {count} without: {reason}" for reason, count in dropped.most_common())
        self.say(iteration, f"{len(rows)} prompts have a row to train on{reasons}")
        if not rows:
            raise RunError(f"iteration {iteration} has nothing to train on{reasons}. The answers are in {stage.path}")
        return self.steps.write(f"iter_{iteration}/rows.jsonl", rows)

    def train(self, iteration: int, model: str, rows: Path, is_last: bool) -> str:
        """Train `model` on the rows; returns where the trained one is."""
        self.say(iteration, f"training {model}")
        output = str(Path(self.config.ckpt.output_dir or self.steps.folder / "model").absolute()) if is_last else None
        name = f"iter_{iteration}/{self.recipe.trained}"
        stage = self.steps.run(name, apart(self.recipe.train(model, rows, output), self.steps.folder, name))
        return output or str(stage.model)

    def evaluate(self, iteration: int, model: str) -> None:
        """The share of held-out prompts whose likeliest answer of `model` is right, and the mean score."""
        if self.config.eval.dataset is None:
            return
        self.say(iteration, "evaluating")
        stage = self.steps.run(f"evaluate_{iteration}", evaluate_run(self.config, model))
        scores = [row["score"] for row in read_lines(stage.path / ANSWERS)]
        passed = sum(score > 0.5 for score in scores) / len(scores)
        self.log(iteration, {"eval/pass1": passed, "eval/reward": sum(scores) / len(scores)})

    def log(self, iteration: int, metrics: dict[str, float]) -> None:
        """Metrics of the model after `iteration` iterations."""
        self.metrics += [{}] * (iteration + 1 - len(self.metrics))
        self.metrics[iteration] = self.metrics[iteration] | metrics
        self.sinks.log(iteration, metrics)
        self.steps.tell(iteration=iteration, iterations=self.config.loop.num_iterations, metrics=self.metrics)

    def say(self, iteration: int, text: str) -> None:
        if self.config.logger.progress:
            place = f"iteration {iteration}/{self.config.loop.num_iterations}"
            Console().print(f"{self.config.task} {place}: {text}", highlight=False, soft_wrap=True)


def run_loop(config: LoopRun, folder: Path, recipe: Recipe) -> dict[str, float]:
    """Run or continue a loop and return its last metrics; the model is in `<folder>/model`."""
    with stages(folder) as steps, closing(MetricLogger(config.logger, RunFolder(folder), 0)) as sinks:
        loop = Loop(config, steps, recipe, sinks)
        metrics = loop.run(first_model(config))
        if config.logger.progress:
            Console().print(table(loop.metrics))
        return metrics


def first_model(config: LoopRun) -> str:
    """The model that the first iteration starts from; a built-in one is warmed up."""
    return warm_started(config.actor.model_name_or_path)


def shares_of(config: LoopRun) -> list[Share]:
    """The prompts of each iteration."""
    rows, count = prompt_rows(config.data).part(0, 1), config.loop.num_iterations
    size = config.loop.prompts_per_iteration
    if size is not None:
        size = min(size, len(rows))
        return [Share(rows.start + i % (len(rows) // size) * size, size) for i in range(count)]
    if len(rows) < count:
        raise UserError(f"loop.num_iterations={count}: there are only {len(rows)} prompts; lower it")
    ends = [len(rows) * i // count for i in range(count + 1)]
    return [Share(rows.start + start, stop - start) for start, stop in pairwise(ends)]


def selected(found: Any) -> tuple[list[dict[str, Any]], Counter[str]]:
    """The rows, and why other prompts have none."""
    rows, dropped = list[dict[str, Any]](), Counter[str]()
    for one in found:
        if isinstance(one, str):
            dropped[one] += 1
        else:
            rows.append(one)
    return rows, dropped


def apart(run: SupervisedRun, folder: Path, name: str) -> SupervisedRun:
    """The run with a name and curves of its own wherever metrics go."""
    logger, label = run.logger, f"{folder.name}/{name}"
    wandb = replace(logger.wandb, group=logger.wandb.group or folder.name, run_name=label)
    tensorboard = logger.tensorboard_dir and str(Path(logger.tensorboard_dir) / Path(label).parent)
    return replace(run, logger=replace(logger, wandb=wandb, tensorboard_dir=tensorboard))


def table(metrics: list[dict[str, float]]) -> Table:
    """A row for the model after each number of iterations: how well it does, and what its answers were good for."""
    names = [name for name in COLUMNS if any(name in row for row in metrics)]
    result = Table("iterations", *(COLUMNS[name] for name in names))
    for iteration, row in enumerate(metrics):
        result.add_row(str(iteration), *(f"{row[name]:.4g}" if name in row else "" for name in names))
    return result
