"""What a run on GPUs is told at its start: faults of the machine refuse it, a plan that does not fit is a remark."""

from __future__ import annotations

from dataclasses import replace

import pytest
from test_checks import GIB, GPUS, H100

from rlhf_suite.composition.arguments import parse
from rlhf_suite.doctor.facts import read_facts
from rlhf_suite.doctor.gpus import Driver
from rlhf_suite.preflight.devices import say_what_does_not_fit
from rlhf_suite.preflight.inspections.machine import gpu_problems, gpus_can_be_used
from rlhf_suite.preflight.jobs import preflight


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
    assert [*say_what_does_not_fit(run, Driver("580.1", (H100,)))] == []
    (remark,) = say_what_does_not_fit(run, Driver("580.1", (replace(H100, total=64 << 20),)))
    assert "do not fit into" in remark and "plan=true" in remark
    assert [*say_what_does_not_fit(run, Driver("580.1", (replace(H100, name="unknown"),)))] == []
