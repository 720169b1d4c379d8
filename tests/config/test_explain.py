"""The batch arithmetic that explain=true shows."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from rlhf_suite.api.explanation import batches, decisions
from rlhf_suite.cli.app import main
from rlhf_suite.config.declarations.runs import Run
from rlhf_suite.config.plan.run_plan import Machine, resolve


@pytest.mark.notices(
    "explain counts one epoch of optimiser steps",
    "config/plan/run_plan.py",
    "-(-samples // run.train.batch_size) * run.train.max_epochs",
    "-(-samples // run.train.batch_size)",
)
def test_an_rl_step_has_the_optimiser_steps_of_all_its_epochs():
    """6 prompts x 8 samples are two batches of 24, gone through three times; two ranks share each in twos."""
    run = Run.of("ppo")
    run.rollout.batch_size, run.rollout.n_samples_per_prompt = 6, 8
    run.train.batch_size, run.train.micro_batch_size, run.train.max_epochs = 24, 2, 3
    run.actor.num_gpus_per_node, run.actor.model_name_or_path = 2, "builtin:tiny"
    found = {what: number for what, _, number in batches(run, resolve(run, Machine("cpu", 0)))}
    assert found["samples per RL step"] == "48"
    assert found["optimiser steps per RL step"] == "6"
    assert found["sequences per rank and optimiser step"] == "12"
    assert found["micro-batches per rank and optimiser step"] == "6"


def test_a_supervised_step_is_shared_by_the_ranks_of_all_nodes():
    run = Run.of("sft")
    run.train.batch_size, run.train.micro_batch_size = 24, 2
    run.actor.num_nodes, run.actor.num_gpus_per_node, run.actor.model_name_or_path = 2, 3, "builtin:tiny"
    found = {what: number for what, _, number in batches(run, resolve(run, Machine("cpu", 0)))}
    assert found["actor ranks"] == "6"
    assert found["micro-batches per rank and optimiser step"] == "2"


@pytest.mark.parametrize(("ranks", "said"), [(1, "1 rank"), (2, "2 ranks")])
def test_a_model_has_one_rank_or_several(ranks, said):
    run = Run.of("sft")
    run.actor.num_gpus_per_node, run.actor.model_name_or_path = ranks, "builtin:tiny"
    model, stage = decisions(run, resolve(run, Machine("cpu", 0)))
    assert model == ("actor", "builtin:tiny", said)
    assert stage[0] == "ZeRO stage" and stage[2] == ("2" if ranks == 2 else "none: torch alone")


def test_ranks_that_split_the_tokens_of_a_batch_count_as_one():
    run = Run.of("sft")
    run.train.batch_size, run.train.micro_batch_size = 24, 2
    run.actor.num_gpus_per_node, run.actor.model_name_or_path, run.ds.ring_attn_size = 6, "builtin:tiny", 2
    found = {what: number for what, _, number in batches(run, resolve(run, Machine("cpu", 0)))}
    assert (found["actor ranks"], found["parts of a batch"]) == ("6", "3")
    assert found["ranks that split the tokens of a batch"] == "2"
    assert found["micro-batches per rank and optimiser step"] == "4"


def test_ranks_that_split_matrices_have_the_same_part_of_a_batch():
    run = Run.of("sft")
    run.train.batch_size, run.train.micro_batch_size, run.actor.num_gpus_per_node = 24, 2, 12
    run.actor.model_name_or_path, run.ds.ring_attn_size, run.ds.tensor_parallel_size = "builtin:tiny", 2, 2
    found = {what: number for what, _, number in batches(run, resolve(run, Machine("cpu", 0)))}
    assert (found["actor ranks"], found["parts of a batch"]) == ("12", "3")
    assert found["ranks that split the matrices of a model"] == "2"
    assert found["micro-batches per rank and optimiser step"] == "4"


def test_a_budget_of_tokens_is_that_of_each_rank_that_splits_them():
    run = Run.of("sft")
    run.train.dynamic_batch_enable, run.train.max_tokens_per_gpu = True, 100
    run.actor.num_gpus_per_node, run.actor.model_name_or_path, run.ds.ring_attn_size = 2, "builtin:tiny", 2
    found = {what: number for what, _, number in batches(run, resolve(run, Machine("cpu", 0)))}
    assert found["micro-batches per rank"] == "<= 200 tokens"


@pytest.mark.parametrize(
    ("model_type", "flags", "said"),
    [
        ("llama", {}, ("ds.packing_samples=null, varlen attention", "packed")),
        ("llama", {"packing_samples": False}, ("ds.packing_samples=false, varlen attention", "padded")),
        ("llama4_text", {}, ("Llama 4 counts the positions of its attention temperature from the start", "padded")),
        (None, {}, ("ds.packing_samples=null, varlen attention", "packed")),
    ],
)
def test_it_says_whether_rows_are_packed_and_what_a_micro_batch_has(tmp_path, model_type, flags, said):
    run = Run.of("sft")
    run.actor.model_name_or_path = "builtin:tiny" if model_type is None else str(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": model_type}))
    run.ds = replace(run.ds, **flags)
    found = {what: (how, number) for what, how, number in batches(run, resolve(run, Machine("cpu", 0)))}
    how, layout = found["rows of a micro-batch"]
    assert said[0] in how and layout == said[1]
    assert found["micro-batches per rank"][1] == "<= 4096 tokens"


def test_a_model_that_has_not_been_fetched_may_be_packed(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    run = Run.of("sft")
    run.actor.model_name_or_path = "nobody/no-model"
    found = {what: number for what, _, number in batches(run, resolve(run, Machine("cpu", 0)))}
    assert found["rows of a micro-batch"] == "packed where it can"


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ({}, None),
        ({"train.async_enable": True}, "while the next step trains"),
        ({"train.async_enable": True, "train.async_queue_size": 0}, None),
        ({"train.async_enable": True, "ckpt.save_steps": 5}, "before the next step"),
        ({"train.async_enable": True, "ckpt.best_metric_key": "eval/pass1"}, "before the next step"),
        (
            {"train.async_enable": True, "ckpt.save_steps": 5, "ckpt.best_metric_key": "none"},
            "while the next step trains",
        ),
        ({"train.async_enable": True, "train.early_stopping_patience": 2}, "before the next step"),
    ],
)
def test_evaluations_go_on_beside_training_unless_something_depends_on_them(flags, said):
    run = Run.of("ppo")
    run.actor.model_name_or_path, run.eval.dataset, run.eval.steps = "builtin:tiny", "builtin:reverse_eval", 2
    for key, value in flags.items():
        section, name = key.split(".")
        setattr(getattr(run, section), name, value)
    found = {what: value for what, _, value in decisions(run, resolve(run, Machine("cpu", 0)))}
    assert found.get("evaluations") == said


@pytest.mark.notices(
    "explain lists the flags of models that the run lacks", "api/explanation.py", " if row[0] not in idle)", ")"
)
@pytest.mark.parametrize(
    ("words", "has", "lacks"),
    [
        ("experiment=grpo", (), ("critic.", "teacher.", "reward.process.", "algo.distill.")),
        ("task=ppo", ("critic.adam.lr",), ("teacher.", "reward.process.")),
        ("experiment=on_policy_distill", ("teacher.model_name_or_path",), ("critic.", "reward.process.")),
        ("task=ppo reward=prm", ("reward.process.model_name_or_path",), ("teacher.",)),
    ],
)
def test_flags_of_models_that_a_run_lacks_are_not_listed(words, has, lacks, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "160")
    assert main([*words.split(), "explain=true"]) == 0
    shown = capsys.readouterr().out.partition("Values that differ")[2]
    listed = [line.split()[1] for line in shown.splitlines() if line.startswith("│")]
    assert {*has} <= {*listed} and not [key for key in listed if key.startswith(lacks)]
