"""Whether a model recomputes its activations in the backward pass, where a run leaves that to the plan.

Recomputation (Chen et al., arXiv:1604.06174) costs another forward pass, about a third of the time of a step. So it is
off where the activations of the longest micro-batch fit beside everything else that the GPU, or on CPUs the machine,
holds then.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from rlhf_suite.config.declarations.runs import Run
from rlhf_suite.config.plan.run_plan import ACTOR, CRITIC, model_sections
from rlhf_suite.planner.needs import Target
from rlhf_suite.planner.remedies import with_values

FREE = 0.15  # of the memory that must stay free without recomputation, because the plan is an estimate
Decisions = Mapping[str, bool]  # whether a model recomputes activations, by its name


def models_to_decide(run: Run) -> list[str]:
    """Return the names of models of which a run leaves it to the plan whether they recompute activations."""
    names = [name for name in (ACTOR, CRITIC) if name in model_sections(run)]
    return [name for name in names if getattr(run, name).gradient_checkpointing_enable is None]


def with_decisions(run: Run, decisions: Decisions) -> Run:
    """Return the run with these decisions in its flags."""
    values = {f"{name}.gradient_checkpointing_enable": decided for name, decided in decisions.items()}
    return with_values(run, values) if values else run


def decide(
    names: list[str], target: Target, peak: Callable[[Decisions], int], supports: Callable[[str], bool]
) -> dict[str, bool]:
    """Return for each of these models whether it recomputes activations on the devices of the plan.

    `peak` returns the bytes of the fullest GPU, or of the machine, with such decisions, and `supports` whether the code
    of a model can recompute.
    """
    decisions = {name: supports(name) for name in names}
    for name in names:
        without = {**decisions, name: False}
        if decisions[name] and peak(without) <= target.memory * (1 - FREE):
            decisions = without
    return decisions
