"""A micro-batch on a GPU has as many tokens as the host needs to keep up, if they fit; a flag of the user wins."""

from __future__ import annotations

from dataclasses import replace

import pytest

from rlhf_suite.config.declarations.runs import Run
from rlhf_suite.config.declarations.sections import section_of
from rlhf_suite.doctor.gpus import GPU, Driver
from rlhf_suite.planner.budget import FREE, HOST_S, MOST_TOKENS, with_budget
from rlhf_suite.planner.devices import find_device
from rlhf_suite.planner.estimate import estimate
from rlhf_suite.planner.needs import Target
from rlhf_suite.planner.table import say_decisions
from rlhf_suite.preflight.memory import fit_to_driver

H100 = find_device("h100-80")
ON_H100 = Target(H100, H100.memory, 0.4 * H100.flops)
LEAST = 4096


@pytest.fixture
def run(folder):
    flags = {"actor.model_name_or_path": folder(), "data.max_len": 1024, "actor.gradient_checkpointing_enable": False}
    return section_of(Run, "sft", flags)


@pytest.mark.notices(
    "the plan's tokens of a micro-batch do not reach the run",
    "preflight/memory.py",
    "with_budget(with_decisions(run, planned.checkpointing), planned.budget)",
    "with_decisions(run, planned.checkpointing)",
)
def test_a_small_model_gets_large_micro_batches(run):
    planned = estimate(run, ON_H100)
    assert planned.budget == MOST_TOKENS and planned.tokens.total == MOST_TOKENS
    driver = Driver("580.1", (GPU("NVIDIA H100 80GB HBM3", "GPU-1", (9, 0), H100.memory, H100.memory),))
    assert fit_to_driver(run, driver)[0].train.max_tokens_per_gpu == MOST_TOKENS
    assert run.train.max_tokens_per_gpu is None  # the record of the run says what the user said
    assert [*say_decisions(planned)] == [
        f"By the plan a micro-batch has at most {MOST_TOKENS} tokens (train.max_tokens_per_gpu=null)."
    ]


def test_the_budget_grows_until_the_gpu_is_busy(run):
    """The operations of a micro-batch of the least size take HOST_S at this speed."""
    of_least = estimate(with_budget(run, LEAST), ON_H100).silences["a micro-batch of the actor"]
    speed = ON_H100.flops * of_least / HOST_S
    assert estimate(run, replace(ON_H100, flops=0.99 * speed)).budget == LEAST
    assert estimate(run, replace(ON_H100, flops=1.01 * speed)).budget == 2 * LEAST


def test_the_budget_grows_while_it_fits(run):
    size = estimate(with_budget(run, 2 * LEAST), ON_H100).peak
    assert estimate(run, replace(ON_H100, memory=round(size / (1 - FREE)) + 1)).budget == 2 * LEAST
    assert estimate(run, replace(ON_H100, memory=round(size / (1 - FREE)) - 1)).budget == LEAST


@pytest.mark.parametrize("flag", ["train.max_tokens_per_gpu", "train.micro_batch_size"])
def test_a_choice_of_the_user_is_no_decision(folder, flag):
    run = section_of(Run, "sft", {"actor.model_name_or_path": folder(), "data.max_len": 64, flag: 128})
    assert estimate(run, ON_H100).budget is None


@pytest.mark.parametrize("target", [Target(None, 1 << 50, 1e9), replace(ON_H100, flops=None)], ids=["CPU", "no speed"])
def test_without_a_known_gpu_the_least_budget_stays(run, target):
    planned = estimate(run, target)
    assert planned.budget is None and planned.tokens.total == LEAST
