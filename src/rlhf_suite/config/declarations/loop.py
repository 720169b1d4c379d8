"""`loop`: the iterations of a loop, and the selection of answers; `eval` of a loop."""

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
    """Iterations. In each, the current model answers prompts and is then trained on selected answers"""

    num_iterations: int = flag(2, "Number of iterations", ge=1, defaults={"conditional_sft": 1})
    prompts_per_iteration: int | None = flag(None, ge=1)
    """Number of prompts per iteration. They are taken in order, and again from the start after the last prompt; null:
    all prompts are divided equally among the iterations"""
    min_score: float | None = flag(None, tasks=("rejection_sampling",))
    """Leave out prompts whose best answer has a score below this number; null: keep all prompts"""
    fixed_reference_enable: bool = flag(
        False,
        when=HAS_REFERENCE.condition,
        needs=(HAS_REFERENCE, Need(is_null("ref.model_name_or_path"), "the reference is already named")),
        tasks=("iterative_dpo",),
    )
    """Use the first model as the reference in every iteration. false: the reference is the model from which the
    iteration starts"""
    target_reward: float | None = flag(None, tasks=("conditional_sft",))
    """Reward that is requested from the trained model in prompts; null: the highest reward of the answers that it was
    trained on"""
    standardize_enable: bool = flag(False, tasks=("conditional_sft",))
    """Write rewards into prompts as (reward - mean) / standard deviation, over all answers of the iteration.
    loop.target_reward is then in the same unit"""


@dataclass
class LoopEvalConfig:
    """Held-out prompts. They are answered and scored before the first iteration and after each iteration"""

    dataset: str | None = flag(None, "Held-out sources, separated by commas; null: none")
    split: str = flag("train", "Name of the split to read from sources with several splits", when=HELD_OUT)
    max_samples: int | None = flag(None, "Number of rows to use, from the start; null: all", ge=1, when=HELD_OUT)
    n_samples_per_prompt: int = flag(1, "Number of answers to each held-out prompt", ge=1, when=HELD_OUT)
    temperature: float = flag(0.0, "Sampling temperature; 0: greedy", ge=0, le=2, when=HELD_OUT)
    rule: str | None = flag(None, algorithms=registry.reward_rule, when=HELD_OUT)
    """Rule that judges held-out answers in addition to the reward. The metric eval/pass1 then comes from this rule;
    null: it comes from the reward, except from a reward model, whose scores have no bound"""
    input_key: str | None = flag(None, when=HELD_OUT)
    """Column of the prompt in the held-out sources; null: data.input_key"""
    label_key: str | None = flag(None, when=HELD_OUT)
    """Column of the label in the held-out sources; null: data.label_key"""


def held_out_rule(section: object) -> str | None:
    """Return the rule that judges the held-out answers of a loop, from the section `eval` of any task."""
    if isinstance(section, LoopEvalConfig) and section.dataset is not None:
        return section.rule
    return None
