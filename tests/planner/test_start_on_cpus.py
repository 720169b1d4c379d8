"""What a run on CPUs decides by the memory of its machine when it starts, and how much memory that is."""

from __future__ import annotations

from pathlib import Path

import pytest

from rlhf_suite.config.declarations.runs import Run
from rlhf_suite.config.declarations.sections import section_of
from rlhf_suite.preflight import memory
from rlhf_suite.preflight.memory import SMALL_BYTES, fit_to_machine, fit_to_memory

PATH, SWITCH = "actor.model_name_or_path", "actor.gradient_checkpointing_enable"


@pytest.fixture
def make_run(folder):
    """Return a function that makes a run of 0.6B parameters, whose folder has so many bytes of weights."""

    def make(weights: int, **flags: object) -> Run:
        path = folder()
        with (Path(path) / "model.safetensors").open("wb") as file:
            file.truncate(weights)
        return section_of(Run, "sft", {PATH: path, "launch.device": "cpu", "ds.param_dtype": "fp32", **flags})

    return make


def test_a_run_that_does_not_fit_hears_of_it_before_it_starts(make_run, monkeypatch):
    run = make_run(SMALL_BYTES)
    monkeypatch.setattr(memory, "machine_memory", lambda: 8 << 30)
    decided, (decision, remark) = fit_to_memory(run)
    assert decided.actor.gradient_checkpointing_enable is True and "recomputes activations" in decision
    assert "By the plan this run does not fit: " in remark and "of this machine" in remark and "plan=true" in remark
    assert run.actor.gradient_checkpointing_enable is None  # the record of the run says what the user said


def test_a_run_that_fits_starts_without_a_word(make_run):
    decided, told = fit_to_machine(make_run(SMALL_BYTES), 1 << 50)
    assert decided.actor.gradient_checkpointing_enable is False and told == []


@pytest.mark.parametrize("chosen", [True, False])
def test_what_a_user_chooses_is_kept(make_run, chosen):
    decided, _ = fit_to_machine(make_run(SMALL_BYTES, **{SWITCH: chosen}), 8 << 30)
    assert decided.actor.gradient_checkpointing_enable is chosen


@pytest.mark.quick
def test_no_plan_is_made_for_small_models(make_run, monkeypatch):
    monkeypatch.setattr(memory, "fit_to_machine", None)
    run = make_run(SMALL_BYTES - 1)
    assert fit_to_memory(run) == (run, [])
    builtin = section_of(Run, "sft", {PATH: "builtin:tiny", "launch.device": "cpu"})
    assert fit_to_memory(builtin) == (builtin, [])


@pytest.mark.quick
def test_no_plan_is_made_of_a_cluster_that_is_elsewhere(make_run, monkeypatch):
    monkeypatch.setattr(memory, "fit_to_machine", None)
    joined = make_run(SMALL_BYTES, **{"launch.ray_address": "10.0.0.1:6379"})
    assert fit_to_memory(joined) == (joined, [])
    for name, value in {"SLURM_PROCID": 0, "SLURM_STEP_NUM_NODES": 2, "SLURM_NTASKS": 2, "SLURM_JOB_ID": 1}.items():
        monkeypatch.setenv(name, str(value))
    run = make_run(SMALL_BYTES)
    assert fit_to_memory(run) == (run, [])
