"""The planner against numbers by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from rlhf_suite.config.declarations.ds import DeepSpeedConfig
from rlhf_suite.config.declarations.rollout import VLLMConfig
from rlhf_suite.config.declarations.runs import Run
from rlhf_suite.config.declarations.sections import section_of
from rlhf_suite.config.plan.run_plan import resolve
from rlhf_suite.errors import UserError
from rlhf_suite.machine_limits import cpu_count
from rlhf_suite.planner import memory
from rlhf_suite.planner.devices import DEVICES, cpu_flops, find_device, find_kind
from rlhf_suite.planner.estimate import BYTES_PER_ROLLOUT_TOKEN, Planner, estimate
from rlhf_suite.planner.memory import BUCKET, GIB, MIB, Memory, Shares
from rlhf_suite.planner.needs import DeviceUse, Process, Target
from rlhf_suite.planner.remedies import changes
from rlhf_suite.planner.trace import Live, Parameters, Tokens, Trace, Use, parameters, trace

FLAG = "actor.model_name_or_path"
FEW = {"vocab_size": 1000, "hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "head_dim": 16}
SMALL = Parameters(
    trained=1000,
    frozen=200,
    quantizable=150,
    largest=300,
    matrices_trained=900,
    matrices_frozen=150,
    attention=64,
    kv_per_token=32,
    kv_heads=2,
    hidden=16,
    vocabulary=50,
)
H100 = find_device("h100-80")
ON_H100 = Target(H100, H100.memory, 0.4 * H100.flops)


def used(path, **changes):
    return Use(path, FLAG, "lm", "bf16", packed=True, **changes)


@pytest.mark.notices(
    "the KV cache is planned for as many key/value heads as there are heads",
    "planner/trace.py",
    'kv_heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads',
    "kv_heads = config.num_attention_heads",
)
def test_the_parameters_of_qwen3_are_those_of_its_config(folder):
    """Embedding 151936 x 1024, once. A layer: q and o 2 x 1024 x 2048, k and v 2 x 1024 x 1024, two norms of 128, a
    gated MLP of 3 x 1024 x 3072, two norms of 1024; and a last norm."""
    layer = 2 * 1024 * 2048 + 2 * 1024 * 1024 + 2 * 128 + 3 * 1024 * 3072 + 2 * 1024
    found = parameters(used(folder()))
    assert found.trained == 151_936 * 1024 + 28 * layer + 1024 == 596_049_920
    assert (found.frozen, found.largest) == (0, 151_936 * 1024)
    assert (found.kv_per_token, found.kv_heads) == (2 * 28 * 8 * 128, 8)
    assert found.matrices_trained == found.trained - 28 * (2 * 128 + 2 * 1024) - 1024


def test_adapters_are_counted_and_the_rest_is_frozen(folder):
    """A in rank x in and B in out x rank for each of the seven matrices of a layer."""
    path = folder(**FEW, num_hidden_layers=2, num_key_value_heads=4)
    whole, found = parameters(used(path)), parameters(used(path, lora=(8, ("all-linear",))))
    layer = 8 * (4 * (64 + 64) + 3 * (64 + 128))
    assert found.trained == 2 * layer
    assert found.frozen == whole.trained
    assert found.quantizable == 2 * (4 * 64 * 64 + 3 * 64 * 128)


def test_experts_count_as_matrices_by_how_many_a_token_visits(folder):
    moe = {"model_type": "qwen3_moe", "architectures": ["Qwen3MoeForCausalLM"], "num_experts": 8}
    path = folder(**FEW, **moe, num_experts_per_tok=2, moe_intermediate_size=32, num_hidden_layers=1)
    found = parameters(used(path))
    experts = 8 * 3 * 64 * 32
    norms = 3 * 64 + 2 * 16
    assert found.matrices_trained == found.trained - norms - experts * 6 // 8
    assert trace(used(path), Tokens(1, 64)).training > 0


def test_adapters_of_experts_can_be_planned(folder):
    """They switch autocast off for the device of the weights, and torch has no autocast for tensors without content."""
    moe = {"model_type": "mixtral", "architectures": ["MixtralForCausalLM"], "num_local_experts": 4}
    path = folder(**FEW, **moe, num_experts_per_tok=2, num_hidden_layers=1, num_key_value_heads=4)
    assert trace(used(path, lora=(4, ("all-linear",))), Tokens(1, 64)).training > 0


def test_a_rank_of_the_tensor_axis_has_half_of_each_matrix_of_a_layer(folder):
    path = folder(**FEW, num_hidden_layers=2, num_key_value_heads=2)
    matrices = 2 * (2 * 64 * 64 + 2 * 64 * 32 + 3 * 64 * 128)
    whole, half = parameters(used(path)), parameters(used(path, tensor=2))
    assert whole.trained - half.trained == matrices // 2


def test_the_counter_knows_when_a_tensor_ends():
    with Live(torch.nn.Identity()) as live:
        first, second = torch.empty(100), torch.empty(50)
        del first
        third = torch.empty(60)
    assert live.peak == 4 * 150
    assert live.now == 4 * 110
    assert len(second) + len(third) == 110


def test_a_checkpointed_layer_keeps_its_input_alone(folder):
    """T x hidden numbers of 2 bytes for each further layer; the peak within a layer does not depend on their number."""
    kept = [
        trace(used(folder(**FEW, num_hidden_layers=n), checkpointing=True), Tokens(1, 256)).training for n in (3, 4)
    ]
    assert kept[1] - kept[0] == 256 * 64 * 2
    plain = [trace(used(folder(**FEW, num_hidden_layers=n)), Tokens(1, 256)).training for n in (3, 4)]
    assert plain[1] - plain[0] > 10 * 256 * 64 * 2


def test_attention_keeps_no_matrix_of_scores_unless_it_is_eager(folder):
    path = folder(**FEW, num_hidden_layers=2, num_key_value_heads=4)
    flash = [trace(used(path), Tokens(1, length)).training for length in (256, 512)]
    assert flash[1] < 2.1 * flash[0]
    eager = trace(Use(path, FLAG, "lm", "bf16", attention="eager"), Tokens(1, 512)).training
    assert eager > flash[1] + 2 * 4 * 512 * 512 * 2


def shares(replicas=4, **flags):
    return Shares(DeepSpeedConfig.of("sft", **flags), replicas, on_gpu=False)


@pytest.mark.notices(
    "ZeRO-1 divides the sums of gradients",
    "planner/memory.py",
    "sums = shares.divide(shares.gradient * counts.trained, 2)",
    "sums = shares.divide(shares.gradient * counts.trained, 1)",
)
def test_zero_divides_what_its_stage_says():
    """N = 1000 trained and 200 frozen parameters over 4 ranks, in bf16 with fp32 sums of gradients."""
    terms = {
        stage: (
            memory.weights(SMALL, each, four_bit=False),
            memory.master_weights(SMALL, each),
            memory.optimizer_moments(SMALL, each),
            memory.gradient_sums(SMALL, each),
        )
        for stage in (1, 2, 3)
        for each in [shares(zero_stage=stage)]
    }
    assert terms == {1: (2400, 1000, 2000, 6000), 2: (2400, 1000, 2000, 1000), 3: (600, 1000, 2000, 1000)}


def test_gathered_weights_are_held_twice_on_their_way():
    """Up to a billion of them whole, and up to 50 million in the flat tensor that they are copied from."""
    large = replace(SMALL, trained=3_000_000_000, frozen=0)
    assert memory.count_gathered(SMALL, shares(zero_stage=3)) == 2 * (1200 + 1200)
    assert memory.count_gathered(large, shares(zero_stage=3)) == 2 * (1_000_000_000 + 50_000_000)
    assert (
        memory.count_gathered(SMALL, shares(1, zero_stage=3)) == memory.count_gathered(SMALL, shares(zero_stage=2)) == 0
    )


def test_torch_alone_keeps_masters_of_bf16_weights_only():
    alone, exact = shares(1, zero_stage=None), shares(1, zero_stage=None, param_dtype="fp32")
    assert (memory.weights(SMALL, alone, four_bit=False), memory.master_weights(SMALL, alone)) == (2400, 4000)
    assert (memory.weights(SMALL, exact, four_bit=False), memory.master_weights(SMALL, exact)) == (4800, 0)


def test_four_bits_hold_only_the_frozen_matrices():
    assert memory.weights(SMALL, shares(1, zero_stage=None), four_bit=True) == round((1200 - 150) * 2 + 150 * 0.516)


def test_a_gpu_takes_the_whole_bucket_of_deepspeed():
    here, there = (
        shares(zero_stage=2),
        Shares(DeepSpeedConfig.of("sft", zero_stage=2, overlap_comm=True), 4, on_gpu=True),
    )
    assert memory.backward_buffers(SMALL, here) == 2 * 1000
    assert memory.backward_buffers(SMALL, there) == 2 * 2 * BUCKET


def test_offload_moves_the_optimiser_to_the_host():
    ds = DeepSpeedConfig.of("sft", zero_stage=2, adam_offload=True)
    found = memory.sum_trained(SMALL, Shares(ds, 4, on_gpu=True), Trace(500, 100))
    assert sum(found.host.values()) == (4 + 8 + 4) * 1000 // 4 + 8 * SMALL.largest
    assert set(found.always) == {"weights", "buffers of the offload"}
    assert set(found.moments) == {"forward and backward"}


@pytest.mark.notices(
    "the KV cache of a plan has the room that a step takes",
    "planner/memory.py",
    "(share or GPU_MEMORY_ALONE)) - own - step",
    "(share or GPU_MEMORY_ALONE)) - own",
)
def test_the_kv_cache_of_an_engine_is_what_its_share_leaves():
    found = memory.engine(SMALL, VLLMConfig.of("ppo", enforce_eager=True), 2, 100, 10 * MIB, 0.5)
    step = memory.step_of_an_engine(SMALL, VLLMConfig.of("ppo"), 2, memory.GPU_BATCHED_TOKENS, 1024)
    assert found.memory.always == {"weights": 2400, "KV cache": 5 * MIB - 2400 - step}
    assert found.kv_tokens == (5 * MIB - 2400 - step) // (2 * 32)
    assert memory.engine(SMALL, VLLMConfig.of("ppo"), 2, 100, None, None).kv_tokens == 64 * MIB // 64


@pytest.mark.notices(
    "the KV cache of an engine on two devices has room for the tokens of one",
    "planner/memory.py",
    "return config.pipeline_parallel_size * min(config.tensor_parallel_size, counts.kv_heads)",
    "return 1",
)
@pytest.mark.notices(
    "a key/value head that several devices of an engine hold is counted as parts",
    "planner/memory.py",
    "min(config.tensor_parallel_size, counts.kv_heads)",
    "config.tensor_parallel_size",
)
@pytest.mark.notices(
    "each device of an engine is planned with all weights",
    "planner/memory.py",
    "own = size * counts.total // config.devices",
    "own = size * counts.total",
)
def test_the_kv_cache_of_an_engine_on_several_devices_is_divided_by_heads_and_layers():
    """Two key/value heads of which four devices hold one each hold no more tokens than two devices."""

    def tokens(tensor: int, stages: int) -> int:
        config = VLLMConfig.of("ppo", kv_cache_mb=1, tensor_parallel_size=tensor, pipeline_parallel_size=stages)
        return memory.engine(SMALL, config, 2, 100, 10 * MIB, 0.5).kv_tokens

    one = MIB // (2 * 32)
    found = [tokens(*each) for each in ((1, 1), (2, 1), (1, 2), (4, 1), (2, 2))]
    assert found == [one, 2 * one, 2 * one, 2 * one, 4 * one]
    two = memory.engine(SMALL, VLLMConfig.of("ppo", tensor_parallel_size=2), 2, 100, None, None)
    assert two.memory.always["weights"] == 2 * (1000 + 200) // 2


@pytest.mark.notices(
    "the other processes of a device take nothing",
    "planner/needs.py",
    "resting + process.memory.peak - process.memory.resting",
    "process.memory.peak",
)
def test_processes_on_one_device_give_back_what_a_moment_took_but_engines_that_do_not_sleep():
    awake = Process("a", 1, Memory({"weights": 10, "state": 20}, {"update": 5}))
    sleeping = Process("b", 1, Memory({"weights": 10, "state": 20}, {"update": 5}, away=frozenset({"state"})))
    engine = Process("c", 1, Memory({"weights": 10, "state": 20}, {"a step": 5}, keeps=True))
    assert DeviceUse(1, (awake, awake)).peak == 35 + 30
    assert DeviceUse(1, (awake, sleeping)).peak == 35 + 30
    assert DeviceUse(1, (sleeping, sleeping)).peak == 35 + 10
    assert DeviceUse(1, (awake, engine)).peak == 35 + 35


@pytest.mark.parametrize("task", ["sft", "rm", "dpo", "ppo"])
def test_more_of_a_micro_batch_never_takes_less(task):
    flags = {FLAG: "builtin:tiny", "train.batch_size": 16, "data.max_len": 512}
    uses = [
        estimate(section_of(Run, task, flags | {"train.micro_batch_size": rows}), ON_H100).devices[0]
        for rows in (1, 4, 16)
    ]
    peaks, passes = (
        [use.peak for use in uses],
        [use.processes[0].memory.moments["forward and backward"] for use in uses],
    )
    assert peaks == sorted(peaks)
    assert passes == sorted(passes) and passes[0] < passes[-1]


@pytest.mark.notices(
    "a pair of answers is planned as one sequence",
    "planner/estimate.py",
    "return run.data.sequences_per_row",
    "return 1",
)
def test_pairs_have_two_sequences_each():
    flags = {FLAG: "builtin:tiny", "train.micro_batch_size": 4, "data.max_len": 64}
    assert estimate(section_of(Run, "dpo", flags), ON_H100).tokens == Tokens(8, 64)
    assert estimate(section_of(Run, "sft", flags), ON_H100).tokens == Tokens(4, 64)


@pytest.mark.parametrize(
    ("loss", "size", "trained", "measured"),
    [
        ("kto", {"micro_batch_size": 4}, 4, 8),
        ("vanilla", {"micro_batch_size": 4}, 4, 4),
        ("kto", {"max_tokens_per_gpu": 640}, 5, 10),
        ("vanilla", {"max_tokens_per_gpu": 640}, 10, 10),
    ],
)
def test_kto_trains_on_one_of_the_two_sequences_of_a_row(loss, size, trained, measured):
    """The other is a mismatched answer, from which the reference point is measured; the vanilla loss has none."""
    sizes = {f"train.{name}": value for name, value in size.items()}
    run = section_of(Run, "kto", {FLAG: "builtin:tiny", "data.max_len": 64, "algo.loss": loss, **sizes})
    planner = Planner(run, resolve(run, ON_H100.machine), ON_H100)
    assert planner.tokens("actor") == Tokens(trained, 64)
    assert planner.tokens("ref") == Tokens(measured, 64)


@pytest.mark.notices(
    "a second model is planned beside adapters",
    "planner/estimate.py",
    "and not model.is_actor and",
    "and",
)
def test_a_reference_is_held_once_more_but_not_beside_adapters():
    flags = {FLAG: "builtin:tiny", "data.max_len": 64}
    plain = estimate(section_of(Run, "dpo", flags), ON_H100).devices[0].processes[0].memory.always
    lora = estimate(section_of(Run, "dpo", flags | {"ds.lora.rank": 8}), ON_H100).devices[0].processes[0].memory.always
    assert plain["weights of ref"] == plain["weights"]
    assert "weights of ref" not in lora


def test_the_reference_of_a_policy_with_adapters_is_no_second_model():
    flags = {FLAG: "builtin:tiny", "data.max_len": 64, "algo.kl.init_coef": 0.01, "train.colocate_all": True}
    plain, lora = (
        estimate(section_of(Run, "ppo", flags | {"ds.lora.rank": rank}), ON_H100).devices[0].processes
        for rank in (0, 8)
    )
    assert [process.name for process in plain] == ["actor", "engine", "critic", "ref"]
    assert [process.name for process in lora] == ["actor", "engine", "critic"]
    assert not any("ref" in term for process in lora for term in process.memory.always)


@pytest.mark.notices(
    "a plan that fits is one whose engines write responses one by one",
    "planner/needs.py",
    "min(self.at_once, SEQUENCES_OF_AN_ENGINE)",
    "min(self.at_once, 1)",
)
def test_a_kv_cache_of_a_few_sequences_lacks_something_but_runs():
    """A cache of 3 whole sequences of 512 tokens, of which 8 would run at one time: 5 are lacking."""
    run = section_of(Run, "ppo", {FLAG: "builtin:tiny", "data.max_len": 512, "vllm.kv_cache_mb": 64})
    plan = estimate(run, ON_H100)
    assert plan.lacking == 0
    small = replace(plan, engine=replace(plan.engine, kv_tokens=3 * 512))
    assert small.fits
    assert small.lacking == 5 * 512 * plan.engine.kv_bytes


@pytest.mark.notices(
    "what several moments lack is what one of them lacks",
    "planner/needs.py",
    "lacking += sum(max(0, rest + size - usable) for size",
    "lacking += max(max(0, rest + size - usable) for size",
)
def test_what_is_lacking_counts_every_moment_of_every_process():
    """So a change that helps one of them is seen, though another one still is the largest."""
    one = Process("a", 1, Memory({"weights": 10}, {"passes": 30, "update": 20}))
    other = Process("b", 1, Memory({"weights": 10}, {"passes": 10}))
    assert DeviceUse(1, (one, other)).lacking(35) == (50 - 35) + (40 - 35)
    assert DeviceUse(1, (one, other)).lacking(50) == 0


HERE = Target(None, 16 * GIB, 1e9)
SFT = {FLAG: "builtin:tiny", "data.max_len": 64}


@pytest.mark.notices(
    "the rollouts of a run take the room of one step", "planner/estimate.py", "step * (steps or 1)", "step"
)
def test_the_rollouts_of_all_steps_stay_on_disk():
    """Of each step batch_size x n_samples_per_prompt x max_len tokens."""
    flags = {FLAG: "builtin:tiny", "data.max_len": 64, "rollout.batch_size": 8, "rollout.n_samples_per_prompt": 4}
    step = 8 * 4 * 64 * BYTES_PER_ROLLOUT_TOKEN
    assert estimate(section_of(Run, "ppo", flags), HERE).disk["rollouts of each step"] == step
    assert (
        estimate(section_of(Run, "ppo", flags | {"train.max_steps": 30}), HERE).disk["rollouts of 30 steps"]
        == 30 * step
    )


def test_weights_of_a_policy_on_a_cpu_go_through_shared_memory():
    run = section_of(Run, "ppo", {FLAG: "builtin:tiny", "data.max_len": 64, "ds.param_dtype": "fp32"})
    weights = parameters(Use("builtin:tiny", FLAG, "lm", "fp32")).total
    assert estimate(run, HERE).shared_memory["weights on their way to the engines"] == 4 * weights
    assert "weights on their way to the engines" not in estimate(run, ON_H100).shared_memory


def test_adapters_of_every_sync_and_the_model_of_the_first_one_go_through_shared_memory():
    flags = {FLAG: "builtin:tiny", "data.max_len": 64, "ds.param_dtype": "fp32", "ds.lora.rank": 4}
    model = parameters(Use("builtin:tiny", FLAG, "lm", "fp32")).total
    adapters = parameters(Use("builtin:tiny", FLAG, "lm", "fp32", lora=(4, ("all-linear",)))).trained
    kept = estimate(section_of(Run, "ppo", flags), HERE).shared_memory
    assert kept["the model without adapters, for the engines"] == 4 * model
    assert kept["adapters on their way to the engines"] == 4 * adapters < model
    merged = estimate(section_of(Run, "ppo", flags | {"vllm.sync_adapters": False}), HERE).shared_memory
    assert merged["weights on their way to the engines"] == 4 * model


@pytest.mark.notices(
    "the copy of weights for engines that start again takes no host memory",
    "planner/estimate.py",
    "return streams and run.train.async_enable and run.vllm.max_restarts > 0",
    "return False",
)
def test_asynchronous_runs_keep_what_they_stream_for_engines_that_start_again():
    flags = {FLAG: "builtin:tiny", "data.max_len": 64, "ds.param_dtype": "fp32", "train.async_enable": True}
    flags |= {"train.async_queue_size": 1, "train.colocate_all": False, "vllm.sync_backend": "gloo"}
    term = "weights of the last sync, for engines that start again"

    def kept(**changes):
        run = section_of(Run, "ppo", flags | {name.replace("__", "."): value for name, value in changes.items()})
        return estimate(run, HERE).host.get(term)

    model = parameters(Use("builtin:tiny", FLAG, "lm", "fp32")).total
    adapters = parameters(Use("builtin:tiny", FLAG, "lm", "fp32", lora=(4, ("all-linear",)))).trained
    assert kept() == 4 * model
    assert kept(ds__lora__rank=4) == 4 * adapters
    assert kept(ds__lora__rank=4, vllm__sync_adapters=False) == 4 * model
    assert kept(vllm__max_restarts=0) is kept(train__async_enable=False) is kept(vllm__sync_backend="shm") is None


def test_a_checkpoint_may_hold_the_model_once_more():
    """max_num + 2 checkpoints, each with the exported model of 2 bytes per weight."""
    kept = {**SFT, "ckpt.save_steps": 5, "ckpt.max_num": 1}
    plain, with_model = (
        estimate(section_of(Run, "sft", kept | {"ckpt.save_hf": hf}), HERE).disk for hf in (False, True)
    )
    assert sum(with_model.values()) - sum(plain.values()) == 3 * plain["final model"]


@pytest.mark.notices(
    "a full disk is no reason not to begin",
    "planner/needs.py",
    "(needed := sum(terms.values())) > free",
    "(needed := max(terms.values(), default=0)) < 0 < free",
)
def test_a_full_disk_and_a_small_shared_memory_are_reasons_not_to_begin():
    run = section_of(Run, "ppo", {FLAG: "builtin:tiny", "data.max_len": 64, "ckpt.save_steps": 5})
    assert estimate(run, replace(HERE, disk=1 << 40, shared_memory=1 << 40)).fits
    problems = estimate(run, replace(HERE, disk=MIB, shared_memory=MIB)).problems
    assert [each.rpartition(" ")[2] for each in problems] == ["disk", "/dev/shm"]
    assert changes(run, on_gpu=False)[0].options[0](run) == {"ckpt.max_num": 1}


@pytest.mark.notices(
    "ranks beyond the cores have cores of their own",
    "planner/estimate.py",
    "ranks if self.on_gpu else min(ranks, cpu_count())",
    "ranks",
)
def test_ranks_beyond_the_cores_share_them():
    cores = cpu_count()
    flags = SFT | {"train.batch_size": 4 * cores, "train.micro_batch_size": 1, "ds.zero_stage": 2}
    times = [
        estimate(section_of(Run, "sft", flags | {"actor.num_gpus_per_node": ranks}), HERE).times
        for ranks in (1, cores, 2 * cores)
    ]
    assert times[0]["actor: passes over a step"] == pytest.approx(cores * times[1]["actor: passes over a step"])
    assert times[1] == times[2]


def test_engines_write_the_responses_of_a_round_at_once():
    """Twice as many responses at once: half as often are the weights read, but as often each response's cache."""
    flags = {FLAG: "builtin:tiny", "data.max_len": 64, "rollout.batch_size": 8, "launch.device": "cuda"}
    small, large = (
        estimate(section_of(Run, "ppo", flags | {"rollout.vllm_generate_batch_size": size}), ON_H100).times[
            "generation"
        ]
        for size in (8, 16)
    )
    assert small / 2 < large < small


def test_an_unknown_gpu_is_one_message():
    with pytest.raises(UserError, match=r"^--gpu h100-81: .*Did you mean h100-80\? Known are .*rtx-3090$"):
        find_device("h100-81")
    with pytest.raises(UserError, match=r"Did you mean h100-pcie or h100-nvl or h100-80\? Known"):
        find_device("H100")
    assert all(each.memory > 8 * GIB for each in DEVICES)


def test_the_rate_of_a_core_is_measured_on_one_thread():
    before = torch.get_num_threads()
    assert min(cpu_flops("fp32"), cpu_flops("bf16")) > 1e6
    assert torch.get_num_threads() == before


def test_the_memory_of_a_judge_is_counted_on_devices_of_its_own(folder):
    """Weights of 2 bytes, and a KV cache of what is left of 0.9 of a GPU, as of an engine that shares nothing."""
    run = Run.of("ppo")
    path = folder(dtype="bfloat16")
    run.actor.model_name_or_path = run.ref.model_name_or_path = path
    run.algo.kl.init_coef, run.algo.advantage.estimator = 0.0, "group_norm"
    run.reward.rubric, run.reward.judge.model, run.reward.judge.max_len = "rubric.md", path, 2048
    run.vllm.quantization = "fp8"
    planner = Planner(run, resolve(run, ON_H100.machine), ON_H100)
    judge = planner.processes()["judge"]
    assert planner.devices(planner.processes())[-1].processes == (judge,)
    assert judge.memory.always["weights"] == 2 * parameters(used(path)).total
    assert judge.memory.peak - judge.memory.always["GPU context"] == pytest.approx(0.9 * H100.memory, rel=1e-6)
    run.reward.judge.tensor_parallel_size = 2
    planner = Planner(run, resolve(run, ON_H100.machine), ON_H100)
    judge = planner.processes()["judge"]
    assert judge.devices == 2 and judge.memory.always["weights"] == parameters(used(path)).total
    assert "judge x 1" in planner.host(planner.processes())


@pytest.mark.notices(
    "a GPU is taken for one whose name is a part of its own",
    "planner/devices.py",
    're.search(rf"\\bG?{re.escape(kind.mark)}\\b", name)',
    "kind.mark in name",
)
@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("NVIDIA H100 80GB HBM3", "h100-80"),
        ("NVIDIA H100 PCIe", "h100-pcie"),
        ("NVIDIA H100 NVL", "h100-nvl"),
        ("NVIDIA H200", "h200"),
        ("NVIDIA GH200 480GB", "h200"),
        ("NVIDIA GB200", "b200"),
        ("NVIDIA H20-3e", "h20"),
        ("NVIDIA A100-SXM4-40GB", "a100-40"),
        ("NVIDIA A100-SXM4-80GB", "a100-80"),
        ("NVIDIA A100 80GB PCIe", "a100-80"),
        ("NVIDIA A10", "a10"),
        ("NVIDIA A10G", "a10g"),
        ("NVIDIA L4", "l4"),
        ("NVIDIA L40", "l40"),
        ("NVIDIA L40S", "l40s"),
        ("NVIDIA GeForce RTX 4090", "rtx-4090"),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", None),
        ("NVIDIA GeForce RTX 5090 D", None),
        ("NVIDIA RTX A1000", None),
        ("NVIDIA A100-SXM4-40GB MIG 1g.5gb", None),
        ("Tesla V100-SXM2-16GB", None),
    ],
)
def test_a_gpu_is_known_by_its_name(name, kind):
    known = find_kind(name)
    assert (known.name if known else None) == kind
