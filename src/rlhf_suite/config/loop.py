"""`loop`: how often a loop generates, selects and trains, and what it selects."""

from __future__ import annotations

from dataclasses import dataclass

from rlhf_suite.config.flags import flag
from rlhf_suite.config.sections import Section


@dataclass
class LoopConfig(Section):
    """Iterations: each answers prompts of its own with the model of the one before, and trains that model on"""

    num_iterations: int = flag(2, "Number of iterations", ge=1, defaults={"conditional_sft": 1})
    prompts_per_iteration: int | None = flag(None, ge=1)
    """Prompts per iteration, taken in order, and from the start again after the last; null: equal shares"""
    min_score: float | None = flag(None, tasks=("rejection_sampling",))
    """Leave out prompts whose best answer scores less than this; null: none"""
    fixed_reference_enable: bool = flag(False, tasks=("iterative_dpo",))
    """The first model is the reference in every iteration, not the one that the iteration starts from"""
    target_reward: float | None = flag(None, tasks=("conditional_sft",))
    """Reward that the trained model is asked for; null: the highest of the answers it was trained on"""
    standardize_enable: bool = flag(False, tasks=("conditional_sft",))
    """Write rewards as (reward - mean) / deviation over all answers of the iteration; loop.target_reward is then in
    these units too"""
