"""task=rejection_sampling: generate answers, fine-tune on the best answer to each prompt, repeat with the new model."""

from __future__ import annotations

from pathlib import Path

from rlhf_suite.config.declarations.runs import Run
from rlhf_suite.config.plan.loop_stages import sft_run
from rlhf_suite.data.response_groups import best_response
from rlhf_suite.tasks.loop import Recipe, run_loop


def run(config: Run, folder: Path) -> dict[str, float]:
    """Run the loop and return its last metrics. The model of the last iteration is in `<folder>/model`."""
    recipe = Recipe(
        trained="sft",
        select=lambda answers: best_response(answers, config.loop.min_score),
        train=lambda model, rows, output: sft_run(config, model, rows, output),
    )
    return run_loop(config, folder, recipe)
