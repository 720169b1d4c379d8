"""Whether activations are recomputed is a decision of the plan, where the flag is null."""

from __future__ import annotations

from dataclasses import replace

import pytest

from rlhf_suite.config.declarations.runs import Run
from rlhf_suite.config.declarations.sections import section_of
from rlhf_suite.planner.checkpointing import FREE, with_decisions
from rlhf_suite.planner.devices import find_device
from rlhf_suite.planner.estimate import estimate
from rlhf_suite.planner.needs import Target
from rlhf_suite.planner.table import say_decisions

H100 = find_device("h100-80")
ON_H100 = Target(H100, H100.memory, None)
PATH, SWITCH = "actor.model_name_or_path", "actor.gradient_checkpointing_enable"


@pytest.fixture
def run(folder):
    """Return a run of a model of 0.6B parameters."""
    return section_of(Run, "sft", {PATH: folder(), "data.max_len": 4096, "ds.param_dtype": "bf16"})


def peak(run, target, **decisions):
    return estimate(with_decisions(run, decisions), target).devices[0].peak


@pytest.mark.notices(
    "activations are kept where they fit into a GPU without a reserve",
    "planner/checkpointing.py",
    "target.memory * (1 - FREE)",
    "target.memory",
)
def test_activations_are_kept_where_they_fit_with_a_reserve(run):
    needed = peak(run, ON_H100, actor=False)
    assert peak(run, ON_H100, actor=True) < needed
    large = replace(ON_H100, memory=round(needed / (1 - FREE)) + 1)
    small = replace(ON_H100, memory=round(needed / (1 - FREE)) - 1)
    assert estimate(run, large).checkpointing == {"actor": False}
    assert estimate(run, small).checkpointing == {"actor": True}
    assert estimate(run, large).peak == needed
    assert estimate(run, small).peak == peak(run, ON_H100, actor=True)
    assert [*say_decisions(estimate(run, small))] == [
        f"By the plan the actor recomputes activations in the backward pass ({SWITCH}=null)."
    ]


def test_a_machine_decides_by_the_memory_of_all_processes(run):
    """On CPUs all processes share the memory, with what they take beside their tensors."""
    kept = estimate(with_decisions(run, {"actor": False}), Target(None, 1 << 50, None))
    assert kept.peak == sum(kept.host.values()) > kept.devices[0].peak
    large = estimate(run, Target(None, round(kept.peak / (1 - FREE)) + 1, None))
    small = estimate(run, Target(None, round(kept.peak / (1 - FREE)) - 1, None))
    assert (large.checkpointing, small.checkpointing) == ({"actor": False}, {"actor": True})
    assert [*say_decisions(large)] == []  # what one expects
    assert [*say_decisions(small)] == [
        f"By the plan the actor recomputes activations in the backward pass ({SWITCH}=null)."
    ]


@pytest.mark.parametrize("chosen", [True, False])
def test_a_choice_of_the_user_is_no_decision(run, chosen):
    run = with_decisions(run, {"actor": chosen})
    assert estimate(run, ON_H100).checkpointing == {}


def test_the_policy_keeps_its_activations_before_the_critic_does(folder):
    """Both fit alone into what is free, not together: they share one GPU."""
    flags = {PATH: folder(), "data.max_len": 2048, "ds.param_dtype": "bf16", "algo.advantage.estimator": "gae"}
    flags |= {"train.colocate_all": True, "vllm.enable_sleep": True, "train.max_tokens_per_gpu": 16_384}
    flags |= {"ds.zero_stage": 2}  # the critic's activations are the peak beside its buffers
    run = section_of(Run, "ppo", flags)
    both, one = peak(run, ON_H100, actor=False, critic=False), peak(run, ON_H100, actor=False, critic=True)
    none = peak(run, ON_H100, actor=True, critic=True)
    assert none <= one <= both and none < both

    def decided(size):
        return estimate(run, replace(ON_H100, memory=round(size / (1 - FREE)) + 1)).checkpointing

    assert decided(both) == {"actor": False, "critic": False}
    assert decided(none - 2) == {"actor": True, "critic": True}
