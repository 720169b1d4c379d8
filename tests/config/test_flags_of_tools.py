"""Flags that a task would never read: it has none of them, or refuses them where nothing reads them."""

from __future__ import annotations

import pytest

from rlhf_suite.composition.arguments import parse
from rlhf_suite.config.declarations.runs import Run, flags_of
from rlhf_suite.config.plan.run_plan import Machine
from rlhf_suite.preflight.devices import Devices, devices_of, list_lacking
from rlhf_suite.preflight.inspections.machine import cluster_accepts, flags_fit_the_device
from rlhf_suite.preflight.jobs import Preflight, preflight

TOOLS = ["check_reward", "chat", "merge_lora", "serve_rm"]


@pytest.mark.parametrize("task", TOOLS)
def test_a_task_without_ray_has_no_flags_of_it(task):
    assert not {"launch.ray_address", "launch.num_cpus", "launch.object_store_mb"} & flags_of(task).keys()
    (problem, *_) = preflight(parse([f"task={task}", "launch.ray_address=auto"])).problems
    assert problem.key == "launch.ray_address" and f"task={task}" in problem.what


@pytest.mark.parametrize("task", TOOLS)
def test_a_task_without_ray_is_on_the_devices_of_this_machine(task, tmp_path, monkeypatch):
    run, checked = Run.of(task), Preflight(is_job=True)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    assert devices_of(run, checked) == Devices(Machine("cuda", 2), 2)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert devices_of(run, checked) == Devices(Machine("cpu", 0), 0)
    assert [*list_lacking(run, devices_of(run, checked))] == []
    assert [*cluster_accepts(run, tmp_path), *flags_fit_the_device(run, tmp_path)] == []
    run.launch.device = "cuda"
    (problem,) = list_lacking(run, devices_of(run, checked))
    assert problem.key == "launch.device" and "no GPU is visible here" in problem.what


def test_a_task_without_a_reward_model_normalises_no_scores():
    assert "reward.normalize_enable" not in flags_of("generate").keys() | flags_of("check_reward").keys()


@pytest.mark.parametrize(
    "word", ["data.max_len=64", "data.apply_chat_template=true", "ds.param_dtype=fp32", "ds.value_head_prefix=head"]
)
def test_what_only_a_reward_model_reads_has_no_effect_with_a_rule(word):
    (problem,) = preflight(parse(["task=score", "demo=score", word])).problems
    assert problem.key == word.partition("=")[0] and "reward.model_name_or_path" in f"{problem}"


@pytest.mark.parametrize("word", ["launch.ray_address=auto", "launch.num_cpus=2", "launch.object_store_mb=100"])
@pytest.mark.parametrize("line", ["task=sft demo=sft", "task=score demo=score"])
def test_what_ray_reads_has_no_effect_where_a_run_is_one_process(line, word):
    (problem,) = preflight(parse([*line.split(), word])).problems
    assert problem.key == word.partition("=")[0] and "is not on Ray" in problem.what
    assert preflight(parse([*line.split(), f"{problem.key}=null"])).problems == []


def test_what_ray_reads_is_taken_by_a_run_of_several_ranks():
    line = "task=sft demo=sft train.micro_batch_size=8 actor.num_gpus_per_node=2 launch.num_cpus=2"
    assert preflight(parse(line.split())).problems == []
