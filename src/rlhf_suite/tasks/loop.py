"""The common part of all loops: generate answers, select rows from them, train on these rows, evaluate, and repeat.

A `Recipe` says how a loop selects rows and what it trains. The stages are `iter_<i>/generate`, `iter_<i>/<trained>`
and, with held-out prompts, `evaluate_<i>` for the model after i iterations.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from contextlib import closing
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

from rich.table import Table

from rlhf_suite.config.declarations.loop import held_out_rule
from rlhf_suite.config.declarations.runs import Run
from rlhf_suite.config.plan.loop_stages import Share, evaluate_run, generate_run, judge_run, score_run
from rlhf_suite.data.response_groups import ResponseGroup, Selected, read_lines, response_groups
from rlhf_suite.data.row_range import prompt_rows
from rlhf_suite.errors import RunError, UserError
from rlhf_suite.run_folders.resume import list_allowed_changes
from rlhf_suite.run_folders.run_folder import RunFolder
from rlhf_suite.tasks.stages import Stages, stages
from rlhf_suite.tasks.warm_start import warm_start
from rlhf_suite.tracking.console import show_line
from rlhf_suite.tracking.metrics import MetricLogger
from rlhf_suite.tracking.tables import open_console
from rlhf_suite.train.output import final_folder

COLUMNS = {
    "eval/pass1": "pass@1",
    "eval/reward": "held-out reward",
    "train/reward": "reward of its answers",
    "loop/rows": "rows trained on",
    "loop/dropped": "prompts dropped",
}


@dataclass(frozen=True)
class Recipe:
    """What distinguishes one loop from another.

    Attributes:
        trained: the name of the training stage.
        select: returns the rows to train on from the answers to one prompt, or the reason why there are none.
        train: returns the run that trains a model, from the model, the file of rows and the output folder.
        target: returns the reward that prompts of the trained model ask for, from the rows it was trained on.
        finish: returns the rows to train on, from those that were selected from all prompts of an iteration.
    """

    trained: str
    select: Callable[[ResponseGroup], Selected]
    train: Callable[[str, Path, str | None], Run]
    target: Callable[[list[dict[str, Any]]], float | None] = lambda rows: None
    finish: Callable[[list[dict[str, Any]]], list[dict[str, Any]]] = lambda rows: rows


@dataclass
class Loop:
    """A loop that runs in its folder."""

    config: Run
    steps: Stages
    recipe: Recipe
    sinks: MetricLogger
    metrics: list[dict[str, float]] = field(default_factory=list)  # by iteration

    def run(self, model: str) -> dict[str, float]:
        """Run all iterations, starting with `model`. Return the last value of each metric."""
        shares, target = shares_of(self.config), None
        self.evaluate(0, model, target)
        for iteration, share in enumerate(shares):
            rows = self.select(iteration, generate_run(self.config, model, iteration, share, target))
            model = self.train(iteration, model, rows, is_last=iteration == len(shares) - 1)
            target = self.recipe.target(rows)
            self.evaluate(iteration + 1, model, target)
        return {name: value for metrics in self.metrics for name, value in metrics.items()}

    def select(self, iteration: int, run: Run) -> list[dict[str, Any]]:
        """Generate answers to the prompts of an iteration and return the rows to train on.

        Raises:
            RunError: nothing was selected.
        """
        self.say(iteration, f"answering {run.data.max_samples} prompts")
        answers, score = self.answers(f"iter_{iteration}/generate", f"iter_{iteration}/score", run)
        groups = response_groups(answers, self.config.data.input_key, self.config.data.tools_key)
        rows, dropped = select_rows(map(self.recipe.select, groups))
        self.log(iteration, {"train/reward": score, "loop/rows": len(rows), "loop/dropped": dropped.total()})
        reasons = "".join(f"; {count} prompts give no row: {reason}" for reason, count in dropped.most_common())
        self.say(iteration, f"{len(rows)} rows to train on{reasons}")
        if not rows:
            raise RunError(f"iteration {iteration} has nothing to train on{reasons}. The answers are in {answers}")
        return self.recipe.finish(rows)

    def train(self, iteration: int, model: str, rows: list[dict[str, Any]], is_last: bool) -> str:
        """Train `model` on the rows. Return the path of the trained model."""
        path = self.steps.write(f"iter_{iteration}/rows.jsonl", rows)
        self.say(iteration, f"training {model}")
        place = final_folder(self.config.ckpt.output_dir, RunFolder(self.steps.folder))
        output = str(place) if is_last else None
        name = f"iter_{iteration}/{self.recipe.trained}"
        stage = self.steps.run(name, apart(self.recipe.train(model, path, output), self.steps.folder, name))
        return str(stage.status().get("outputs", {}).get("actor", output or stage.model))

    def evaluate(self, iteration: int, model: str, target: float | None) -> None:
        """Log the mean reward of the answers to held-out prompts, and the share of them that is right: by eval.rule, or
        by the reward where it is not a reward model, whose scores have no bound."""
        if self.config.eval.dataset is None:
            return
        self.say(iteration, "evaluating" + ("" if target is None else f", asked for a reward of {target:g}"))
        run = evaluate_run(self.config, model, target)
        answers, _ = self.answers(f"evaluate_{iteration}", f"evaluate_{iteration}_score", run)
        rewards = [row["score"] for row in read_lines(answers)]
        metrics, verdicts = {"eval/reward": sum(rewards) / len(rewards)}, rewards
        has_rule = held_out_rule(self.config.eval) is not None
        if has_rule:
            stage = self.steps.run(f"evaluate_{iteration}_rule", judge_run(self.config, answers))
            verdicts = [row["score"] for row in read_lines(stage.path / "scores.jsonl")]
        if has_rule or self.config.reward.model_name_or_path is None:
            metrics["eval/pass1"] = sum(score > 0.5 for score in verdicts) / len(verdicts)
        self.log(iteration, metrics)

    def answers(self, name: str, scorer: str, run: Run) -> tuple[Path, float]:
        """Return the file of the scored answers and their mean score. A reward model scores them in its own stage."""
        stage, file = self.steps.run(name, run), "generations.jsonl"
        if self.config.reward.model_name_or_path is not None:
            stage, file = self.steps.run(scorer, score_run(self.config, stage.path / file)), "scores.jsonl"
        return stage.path / file, stage.status()["metrics"]["score"]

    def log(self, iteration: int, metrics: dict[str, float]) -> None:
        """Metrics of the model after `iteration` iterations."""
        self.metrics += [{}] * (iteration + 1 - len(self.metrics))
        self.metrics[iteration] = self.metrics[iteration] | metrics
        self.sinks.log(iteration, metrics)
        self.steps.record(iteration=iteration, iterations=self.config.loop.num_iterations, metrics=self.metrics)

    def say(self, iteration: int, text: str) -> None:
        if self.config.logger.progress:
            place = f"iteration {iteration}/{self.config.loop.num_iterations}"
            show_line(f"{self.config.task} {place}: {text}")


def run_loop(config: Run, folder: Path, recipe: Recipe) -> dict[str, float]:
    """Run or continue a loop and return its last metrics; the model is in `<folder>/model`."""
    config = with_trained_judge(config)
    with (
        stages(folder, list_allowed_changes(config)) as steps,
        closing(MetricLogger(config.logger, RunFolder(folder), 0)) as sinks,
    ):
        loop = Loop(config, steps, recipe, sinks)
        metrics = loop.run(first_model(config))
        if config.logger.progress:
            open_console().print(table(loop.metrics))
        return metrics


def first_model(config: Run) -> str:
    """The model that the first iteration starts from; a built-in one is warmed up."""
    return warm_start(config.actor.model_name_or_path, prompts=config.data.prompt_dataset)


def with_trained_judge(config: Run) -> Run:
    """Return the loop with the folder of its reward model; a built-in one is trained on pairs of the built-in tasks of
    the prompts, as in task=ppo. The rows of the stage that scores would not say which tasks these are."""
    path = config.reward.model_name_or_path
    if path is None:
        return config
    judge = warm_start(path, "rm", prompts=config.data.prompt_dataset)
    return replace(config, reward=replace(config.reward, model_name_or_path=judge))


def shares_of(config: Run) -> list[Share]:
    """Return the share of the prompts for each iteration; raise UserError if there are fewer prompts than
    iterations.
    """
    rows, count = prompt_rows(config.data).part(0, 1), config.loop.num_iterations
    size = config.loop.prompts_per_iteration
    if size is not None:
        size = min(size, len(rows))
        return [Share(rows.start + i % (len(rows) // size) * size, size) for i in range(count)]
    if len(rows) < count:
        raise UserError(f"loop.num_iterations={count}: there are only {len(rows)} prompts; use fewer iterations")
    ends = [len(rows) * i // count for i in range(count + 1)]
    return [Share(rows.start + start, stop - start) for start, stop in pairwise(ends)]


def select_rows(results: Iterable[Selected]) -> tuple[list[dict[str, Any]], Counter[str]]:
    """Return the selected rows, and for how many prompts nothing was selected, by reason."""
    rows, dropped = list[dict[str, Any]](), Counter[str]()
    for one in results:
        if isinstance(one, str):
            dropped[one] += 1
        else:
            rows += one
    return rows, dropped


def apart(run: Run, folder: Path, name: str) -> Run:
    """Return the run with a name of its own in Weights & Biases and TensorBoard."""
    logger, label = run.logger, f"{folder.name}/{name}"
    wandb = replace(logger.wandb, group=logger.wandb.group or folder.name, run_name=label)
    tensorboard = logger.tensorboard_dir and str(Path(logger.tensorboard_dir) / Path(label).parent)
    return replace(run, logger=replace(logger, wandb=wandb, tensorboard_dir=tensorboard))


def table(metrics: list[dict[str, float]]) -> Table:
    """Return a table with the metrics of the model after each number of iterations."""
    names = [name for name in COLUMNS if any(name in row for row in metrics)]
    result = Table("iterations", *(COLUMNS[name] for name in names))
    for iteration, row in enumerate(metrics):
        result.add_row(str(iteration), *(f"{row[name]:.4g}" if name in row else "" for name in names))
    return result
