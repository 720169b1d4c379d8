"""What a run on GPUs is told at its start: faults of the machine refuse it, a plan that does not fit is a remark."""

from __future__ import annotations

from dataclasses import replace

import pytest
from test_checks import GIB, GPUS, H100

from rlhf_suite.composition.arguments import parse
from rlhf_suite.doctor.facts import read_facts
from rlhf_suite.doctor.gpus import Driver
from rlhf_suite.preflight.inspections.machine import gpu_problems, gpus_can_be_used
from rlhf_suite.preflight.jobs import preflight
from rlhf_suite.preflight.memory import fit_to_driver


@pytest.fixture
def run(monkeypatch, tmp_path):
    """Return a run that begins where one GPU is visible."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    (run,) = preflight(parse(["task=sft", "demo=sft"])).runs
    return run


@pytest.mark.quick
@pytest.mark.parametrize(
    ("facts", "words"),
    [
        (replace(GPUS, driver=None), "there is no NVIDIA driver here"),
        (replace(GPUS, driver=Driver("550.1", (H100,))), "cuda, but driver: 550.1; torch 2.13.0"),
        (replace(GPUS, torch_cuda=None), "cuda, but torch: torch 2.13.0"),
        (
            replace(GPUS, driver=Driver("580.1", (replace(H100, is_exclusive=True),))),
            "cuda, but GPU 0: its compute",
        ),
    ],
)
def test_a_fault_of_the_machine_refuses_a_run(facts, words):
    (problem,) = gpu_problems(facts)
    assert problem.key == "launch.device" and words in problem.what and problem.fix


@pytest.mark.quick
def test_notes_do_not_refuse_a_run():
    assert [*gpu_problems(replace(GPUS, driver=Driver("580.1", (replace(H100, free=GIB),))))] == []


@pytest.mark.quick
def test_a_run_is_inspected_where_it_will_be(run, tmp_path):
    said = [problem.key for problem in gpus_can_be_used(run, tmp_path)]
    assert said == ([] if isinstance(read_facts().driver, Driver) else ["launch.device"])
    assert [*gpus_can_be_used(run, None)] == []  # its machine is not known yet


def test_a_plan_that_does_not_fit_is_a_remark(run):
    keeps, told = fit_to_driver(run, Driver("580.1", (H100,)))
    assert told == [
        "By the plan the actor keeps its activations, which fit (actor.gradient_checkpointing_enable=null)."
    ]
    recomputes, (decision, remark) = fit_to_driver(run, Driver("580.1", (replace(H100, total=64 << 20),)))
    assert "recomputes activations" in decision
    assert "do not fit into" in remark and "plan=true" in remark
    assert run.actor.gradient_checkpointing_enable is None  # the record of the run says what the user said
    assert (keeps.actor.gradient_checkpointing_enable, recomputes.actor.gradient_checkpointing_enable) == (False, True)


def test_a_deadline_that_a_micro_batch_exceeds_is_a_remark(run):
    run.launch.timeout_s = 1e-9
    _, (_, late) = fit_to_driver(run, Driver("580.1", (H100,)))
    assert "launch.timeout_s=1e-09 ends the run: write launch.timeout_s=100" in late


@pytest.mark.parametrize("driver", [None, Driver("580.1", (replace(H100, name="unknown"),))])
def test_activations_are_recomputed_on_gpus_that_the_plan_does_not_know(run, driver):
    decided, (remark,) = fit_to_driver(run, driver)
    assert decided.actor.gradient_checkpointing_enable is True
    assert "write actor.gradient_checkpointing_enable=false to keep them" in remark


@pytest.mark.parametrize("chosen", [True, False])
def test_what_a_user_chooses_is_kept(run, chosen):
    run.actor.gradient_checkpointing_enable = chosen
    for driver in (None, Driver("580.1", (H100,))):
        decided, told = fit_to_driver(run, driver)
        assert decided.actor.gradient_checkpointing_enable is chosen and told == []
