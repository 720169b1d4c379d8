"""`scale=tiny`: a run of any size as a small one, with the method that it has."""

from __future__ import annotations

import pytest

from rlhf_suite.composition.arguments import parse
from rlhf_suite.composition.config_file import with_config_file
from rlhf_suite.composition.presets import preset_names
from rlhf_suite.config.declarations.flags import all_values
from rlhf_suite.preflight.jobs import preflight

LARGE = """
experiment: grpo
actor: {model_name_or_path: org/large, num_gpus_per_node: 8, adam: {lr: 1e-6}}
ref: {num_gpus_per_node: 8}
reward: {rule: math}
vllm: {num_engines: 8, enable_sleep: true, gpu_memory_utilization: 0.5}
data: {prompt_dataset: org/rows, input_key: question, label_key: answer, apply_chat_template: true, max_len: 5120}
algo: {kl: {init_coef: 0.02}}
train: {colocate_all: true, batch_size: 1024, max_tokens_per_gpu: 16384}
ds: {zero_stage: 3}
"""
METHOD = {"algo.advantage.estimator": "group_norm", "algo.kl.init_coef": 0.02, "ds.zero_stage": 3}
METHOD |= {"train.colocate_all": True, "vllm.gpu_memory_utilization": 0.5, "train.max_tokens_per_gpu": 16384}
SCALED = {
    "actor.model_name_or_path": "builtin:tiny",
    "data.prompt_dataset": "builtin:reverse",
    "data.input_key": "input",
}
SCALED |= {"actor.num_gpus_per_node": 1, "ref.num_gpus_per_node": 1, "vllm.num_engines": 1, "data.max_len": 64}
SCALED |= {
    "data.apply_chat_template": False,
    "reward.rule": "exact_match",
    "actor.adam.lr": 1e-3,
    "train.max_steps": 16,
}


@pytest.fixture
def recipe(tmp_path):
    file = tmp_path / "recipe.yaml"
    file.write_text(LARGE)
    return file


def found_for(*words):
    return preflight(with_config_file(parse([*map(str, words)])))


def values_for(*words):
    found = found_for(*words)
    assert found.problems == []
    (run,) = found.runs
    return all_values(run)


def test_models_rows_and_sizes_become_small_and_the_method_stays(recipe):
    values = values_for("--config", recipe, "scale=tiny")
    assert {key: values[key] for key in METHOD | SCALED} == METHOD | SCALED


def test_flags_win_over_the_scale(recipe):
    values = values_for("--config", recipe, "scale=tiny", "data.max_len=32", "train.max_steps=2")
    assert (values["data.max_len"], values["train.max_steps"]) == (32, 2)
    assert values_for("experiment=grpo", "train.max_steps=3", "scale=tiny")["train.max_steps"] == 3


def test_a_file_of_the_scale_beside_the_recipe_wins_over_the_scale_alone(recipe):
    recipe.with_name("tiny.yaml").write_text(
        "reward: {rule: length}\nrollout: {max_new_tokens: 8}\nds: {zero_stage: 2}\n"
    )
    words = ("--config", recipe, "scale=tiny")
    keys = ("reward.rule", "rollout.max_new_tokens", "ds.zero_stage")
    assert [values_for(*words)[key] for key in keys] == ["length", 8, 2]
    chosen = values_for(*words, "reward=code", "ds.zero_stage=1")
    assert [chosen[key] for key in keys] == ["code", 8, 1]
    assert values_for("--config", recipe, "scale=tiny")["actor.num_gpus_per_node"] == 1


def test_a_file_beside_the_recipe_is_not_read_without_the_scale(recipe):
    recipe.with_name("tiny.yaml").write_text("not a flag: 1\n")
    words = ("actor.model_name_or_path=builtin:tiny", "data.prompt_dataset=builtin:reverse")
    assert not [each for each in found_for("--config", recipe, *words).problems if each.key == "not a flag"]
    assert [each.key for each in found_for("--config", recipe, "scale=tiny").problems] == ["not a flag"]


@pytest.mark.parametrize("task", preset_names("demo"))
def test_every_demo_of_a_task_can_be_scaled(task):
    if task not in preset_names("task"):
        pytest.skip("a variant of a demo")
    assert found_for(f"task={task}", "scale=tiny").problems == []


@pytest.mark.parametrize(
    ("words", "what", "fix"),
    [
        (["task=sft", "scale=huge"], "there is no preset scale/huge", "choose scale=tiny"),
        (
            ["task=serve_rm", "scale=tiny"],
            "tiny does not fit this task: task=serve_rm has no demo",
            "remove scale=tiny",
        ),
    ],
)
def test_another_scale_and_a_task_without_a_demo_are_one_problem(words, what, fix):
    (problem,) = found_for(*words).problems
    assert problem.key == "scale"
    assert problem.what.startswith(what)
    assert problem.fix == fix


def test_a_scale_needs_a_task():
    (problem,) = found_for("scale=tiny").problems
    assert problem.key == "task"
