"""`loop`: how often a loop generates, selects and trains, and what it selects; `eval` of a loop."""

from __future__ import annotations

from dataclasses import dataclass

from rlhf_suite import registry
from rlhf_suite.config.declarations.conditions import Need, is_null
from rlhf_suite.config.declarations.eval import HELD_OUT
from rlhf_suite.config.declarations.flags import flag
from rlhf_suite.config.declarations.models import HAS_REFERENCE
from rlhf_suite.config.declarations.sections import Section


@dataclass
class LoopConfig(Section):
    """Iterations: each answers prompts of its own with the model of the one before, and trains that model on"""

    num_iterations: int = flag(2, "Number of iterations", ge=1, defaults={"conditional_sft": 1})
    prompts_per_iteration: int | None = flag(None, ge=1)
    """Prompts per iteration, taken in order, and from the start again after the last; null: equal shares"""
    min_score: float | None = flag(None, tasks=("rejection_sampling",))
    """Leave out prompts whose best answer scores less than this; null: none"""
    fixed_reference_enable: bool = flag(
        False,
        when=HAS_REFERENCE.condition,
        needs=(HAS_REFERENCE, Need(is_null("ref.model_name_or_path"), "the reference is already named")),
        tasks=("iterative_dpo",),
    )
    """The first model is the reference in every iteration, not the one that the iteration starts from"""
    target_reward: float | None = flag(None, tasks=("conditional_sft",))
    """Reward that the trained model is asked for; null: the highest of the answers it was trained on"""
    standardize_enable: bool = flag(False, tasks=("conditional_sft",))
    """Write rewards as (reward - mean) / deviation over all answers of the iteration; loop.target_reward is then in
    these units too"""


@dataclass
class LoopEvalConfig:
    """Held-out prompts, answered and scored before the first iteration and after each"""

    dataset: str | None = flag(None, "Comma list of held-out sources; null: none")
    split: str = flag("train", "Split of sources that have several", when=HELD_OUT)
    max_samples: int | None = flag(None, "Rows taken from the start; null: all", ge=1, when=HELD_OUT)
    n_samples_per_prompt: int = flag(1, "Answers to each held-out prompt", ge=1, when=HELD_OUT)
    temperature: float = flag(0.0, "Sampling temperature; 0: greedy", ge=0, le=2, when=HELD_OUT)
    rule: str | None = flag(None, algorithms=registry.reward_rule, when=HELD_OUT)
    """A rule that judges held-out answers beside the reward, and gives eval/pass1; null: the reward gives it, but a
    reward model does not, since its scores have no bound"""
    input_key: str | None = flag(None, when=HELD_OUT)
    """Column of the prompt in the held-out sources; null: data.input_key"""
    label_key: str | None = flag(None, when=HELD_OUT)
    """Column of the label in the held-out sources; null: data.label_key"""


def held_out_rule(section: object) -> str | None:
    """Return the rule that judges the held-out answers of a loop, from the section `eval` of any task."""
    if isinstance(section, LoopEvalConfig) and section.dataset is not None:
        return section.rule
    return None
