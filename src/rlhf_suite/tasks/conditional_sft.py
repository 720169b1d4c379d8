"""task=conditional_sft: generate answers, fine-tune on all of them with their rewards in the prompts, and repeat."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rlhf_suite.algo.scores import standardize
from rlhf_suite.config.declarations.runs import Run
from rlhf_suite.config.plan.loop_stages import SCORE, sft_run
from rlhf_suite.data.response_groups import all_responses
from rlhf_suite.tasks.loop import Recipe, run_loop


def run(config: Run, folder: Path) -> dict[str, float]:
    """Run the loop and return its last metrics. The model of the last iteration is in `<folder>/model`."""
    target = config.loop.target_reward
    recipe = Recipe(
        trained="sft",
        select=all_responses,
        train=lambda model, rows, output: sft_run(config, model, rows, output),
        target=lambda rows: target if target is not None else max(row[SCORE] for row in rows),
        finish=standardize_rows if config.loop.standardize_enable else Recipe.finish,
    )
    return run_loop(config, folder, recipe)


def standardize_rows(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the rows with rewards that are standardised over all of them."""
    scores = standardize([row[SCORE] for row in rows])
    return [row | {SCORE: score} for row, score in zip(rows, scores, strict=True)]
