"""task=conditional_sft: answer prompts, tune on all answers with their rewards in the prompts; ask for the highest."""

from __future__ import annotations

from pathlib import Path

from rlhf_suite.config.loop_stages import SCORE, sft_run
from rlhf_suite.config.runs import ConditionalSFTRun
from rlhf_suite.data.response_groups import all_responses
from rlhf_suite.tasks.loop import Recipe, run_loop


def run(config: ConditionalSFTRun, folder: Path) -> dict[str, float]:
    """Return the last metrics; the model of the last iteration is in `<folder>/model`."""
    asked = config.loop.target_reward
    recipe = Recipe(
        trained="sft",
        select=all_responses,
        train=lambda model, rows, output: sft_run(config, model, rows, output),
        target=lambda rows: asked if asked is not None else max(row[SCORE] for row in rows),
    )
    return run_loop(config, folder, recipe)
