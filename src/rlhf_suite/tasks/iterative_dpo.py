"""task=iterative_dpo: generate answers, train by DPO on the best and worst answers, repeat with the new model."""

from __future__ import annotations

from pathlib import Path

from rlhf_suite.config.declarations.runs import Run
from rlhf_suite.config.plan.loop_stages import dpo_run
from rlhf_suite.data.response_groups import best_and_worst_responses
from rlhf_suite.tasks.loop import Recipe, first_model, run_loop


def run(config: Run, folder: Path) -> dict[str, float]:
    """Run the loop and return its last metrics. The model of the last iteration is in `<folder>/model`."""
    reference = first_model(config) if config.loop.fixed_reference_enable else config.ref.model_name_or_path
    recipe = Recipe(
        trained="dpo",
        select=best_and_worst_responses,
        train=lambda model, rows, output: dpo_run(config, (model, reference), rows, output),
    )
    return run_loop(config, folder, recipe)
