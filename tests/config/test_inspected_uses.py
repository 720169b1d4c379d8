"""Ways of computing that a model cannot take part in: split sequences and matrices, attentions, kernels."""

from __future__ import annotations

import pytest
from inspected_lines import PPO, RULE, SFT, found, one

from rlhf_suite.preflight.inspections.model_files import head_sizes_on_cpu

RING = (
    "task=sft data.dataset=builtin:reverse data.output_key=output ds.packing_samples=true actor.num_gpus_per_node=2 "
    "ds.ring_attn_size=2 "
)


@pytest.mark.parametrize(
    ("mode", "settings", "said"),
    [
        ("gather", {"num_attention_heads": 3}, None),
        ("ulysses", {"num_attention_heads": 4, "num_key_value_heads": 1}, None),
        ("ulysses", {"num_attention_heads": 3}, "3 query and 3 key/value heads"),
        ("ulysses", {"num_attention_heads": 6, "num_key_value_heads": 3}, "6 query and 3 key/value heads"),
        ("ring", {"num_attention_heads": 4, "sliding_window": 99}, "the sliding window of 99 tokens"),
        ("gather", {"num_attention_heads": 4, "sliding_window": 99}, "the sliding window of 99 tokens"),
        ("ring", {"num_attention_heads": 4, "sliding_window": 100}, None),
        ("ring", {"num_attention_heads": 4, "sliding_window": 9, "use_sliding_window": False}, None),
        ("ulysses", {"num_attention_heads": 4, "sliding_window": 99}, None),
    ],
)
def test_the_mode_of_sequence_parallelism_fits_the_model(model, mode, settings, said):
    path = model(tokenizer={"chat_template": "x"}, **settings)
    line = RING + f"ds.ring_attn_mode={mode} data.max_len=100 actor.model_name_or_path={path}"
    if said is None:
        assert found(line) == []
    else:
        key, problem = one(line)
        assert key == "ds.ring_attn_mode" and said in problem


SPLIT = "ds.ring_attn_size=2"


@pytest.mark.notices(
    "what a family of models cannot do is found when it is loaded",
    "preflight/inspections/models.py",
    "        why = family(files).why_not(feature) if is_asked else None\n",
    "        why = None\n",
)
@pytest.mark.parametrize(
    ("settings", "words", "key", "said"),
    [
        ({"model_type": "qwen3_5_text"}, SPLIT, "ds.ring_attn_size", "has gated-delta layers"),
        ({"model_type": "qwen3_5", "text_config": {}}, SPLIT, "ds.ring_attn_size", "has gated-delta layers"),
        ({"model_type": "gpt_oss"}, f"{SPLIT} ds.ring_attn_mode=ring", "ds.ring_attn_mode", "=ulysses"),
        ({"model_type": "gpt_oss"}, f"{SPLIT} ds.ring_attn_mode=ulysses", None, None),
        ({"model_type": "lfm2"}, "ds.tensor_parallel_size=2", "ds.tensor_parallel_size", "has convolution layers"),
        ({"model_type": "gpt_oss"}, "ds.tensor_parallel_size=2", "ds.tensor_parallel_size", "has attention sinks"),
        ({"model_type": "llama4_text"}, "", "ds.packing_samples", "Llama 4 counts the positions"),
        ({"layer_types": ["new"]}, "", "ds.packing_samples", "layers of type new"),
        ({"model_type": "lfm2", "layer_types": ["conv"]}, "", None, None),
    ],
)
def test_what_the_family_of_a_model_cannot_do_is_refused(model, settings, words, key, said):
    path = model(tokenizer={"chat_template": "x"}, **settings)
    packed = f"{SFT} ds.packing_samples=true actor.num_gpus_per_node=2 actor.model_name_or_path={path}"
    problems = found(f"{packed} {words}")
    if key is None:
        assert problems == []
    else:
        assert key in {problem[0] for problem in problems}, problems
        assert any(said in problem[1] for problem in problems), problems


def test_a_family_that_is_padded_does_not_fill_rows(model):
    """A padded row of several examples would have the padding that the flag is to save."""
    path = model(model_type="llama4_text", tokenizer={"chat_template": "x"})
    line = f"{SFT} actor.model_name_or_path={path}"
    assert found(line) == []
    (problem,) = found(f"{line} data.pack_to_max_len=true")
    assert problem[0] == "data.pack_to_max_len" and "Llama 4 counts the positions" in problem[1]
    assert "write data.pack_to_max_len=false" in problem[1]


@pytest.mark.parametrize(
    ("model_type", "attention", "said"),
    [
        ("gemma2", "sdpa", "sdpa does not compute the attention of Gemma 2"),
        ("gpt_oss", "sdpa", "write ds.attn_implementation=null, which is varlen for this model"),
        ("llama4_text", "varlen", "which is sdpa for this model"),
        ("gemma2", "eager", None),
        ("gemma2", "null", None),
        ("llama", "sdpa", None),
    ],
)
def test_an_attention_that_computes_something_else_is_refused(model, model_type, attention, said):
    path = model(tokenizer={"chat_template": "x"}, model_type=model_type)
    words = f"{SFT} ds.packing_samples=false ds.attn_implementation={attention} actor.model_name_or_path={path}"
    problems = found(words)
    assert problems == [] if said is None else [said in problem[1] for problem in problems] == [True]


def test_a_head_whose_settings_mean_nothing_known_is_refused(model):
    path = model(tokenizer={"chat_template": "x"}, model_type="llama", logits_scaling=8.0)
    assert "logits_scaling (8.0)" in one(f"{SFT} actor.model_name_or_path={path}")[1]
    path = model("capped", tokenizer={"chat_template": "x"}, model_type="recurrent_gemma", logits_soft_cap=30.0)
    assert "logits_soft_cap (30.0)" in one(f"{SFT} actor.model_name_or_path={path}")[1]
    path = model("other", tokenizer={"chat_template": "x"}, model_type="granite", logits_scaling=8.0)
    assert found(f"{SFT} actor.model_name_or_path={path}") == []


TENSOR = (
    "task=sft data.dataset=builtin:reverse data.output_key=output actor.num_gpus_per_node=4 ds.tensor_parallel_size=4 "
    "data.max_len=100 "
)


@pytest.mark.notices(
    "the preflight takes the matrices of a mixture of experts for divisible",
    "preflight/inspections/models.py",
    'if experts is not None or files.setting("vision_config") is not None:',
    'if files.setting("vision_config") is not None:',
)
@pytest.mark.notices(
    "the preflight looks at no width of a model",
    "preflight/inspections/models.py",
    "if isinstance(size, int) and size % use.tensor:",
    "if isinstance(size, int) and size < use.tensor:",
)
@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"num_attention_heads": 8, "num_key_value_heads": 4, "intermediate_size": 12}, None),
        ({"num_attention_heads": 8, "num_key_value_heads": 2}, "4 ranks cannot split the num_key_value_heads=2"),
        ({"num_attention_heads": 6, "num_key_value_heads": 8}, "write ds.tensor_parallel_size=2"),
        ({"num_attention_heads": 4, "intermediate_size": 9}, "write ds.tensor_parallel_size=1"),
        ({"num_attention_heads": 4, "num_local_experts": 8}, "a mixture of experts (num_local_experts)"),
        ({"num_attention_heads": 4, "vision_config": {}}, "a model that reads images"),
    ],
)
def test_tensor_parallelism_fits_the_model(model, settings, said):
    line = TENSOR + f"actor.model_name_or_path={model(tokenizer={'chat_template': 'x'}, **settings)}"
    if said is None:
        assert found(line) == []
    else:
        key, problem = one(line)
        assert key == "ds.tensor_parallel_size" and said in problem


@pytest.mark.notices(
    "heads whose size is the default of their family are taken from the width",
    "preflight/inspections/model_files.py",
    "            return int(default[1])\n",
    "            pass\n",
)
@pytest.mark.notices(
    "heads without kernels are found by the engine",
    "preflight/inspections/models.py",
    "    if sizes and size is not None and size not in sizes:\n",
    "    if False:\n",
)
@pytest.mark.parametrize(
    ("settings", "size"),
    [
        ({"head_dim": 24}, 24),
        ({"head_dim": 64}, None),
        ({"hidden_size": 96, "num_attention_heads": 4}, None),  # qwen3 has 128 where nothing is said
        ({"model_type": "llama", "hidden_size": 96, "num_attention_heads": 4}, 24),
        ({"model_type": "llama", "hidden_size": 96, "num_attention_heads": 3}, None),
        ({"model_type": "gpt2", "n_embd": 96, "n_head": 2}, 48),
        ({"text_config": {"model_type": "gemma3_text", "hidden_size": 2560, "num_attention_heads": 8}}, None),
        ({"head_dim": 24, "kv_lora_rank": 512}, None),
    ],
)
@pytest.mark.vllm
def test_attention_heads_without_kernels_on_the_cpu_are_told_before_the_start(model, tmp_path, settings, size):
    path, folder = model(**settings), tmp_path / "run"
    line = f"{PPO}reward.rule=exact_match rollout.max_new_tokens=64 data.max_len=256 actor.model_name_or_path={path} "
    assert found(line + "launch.device=cpu") == [], "which machine it will be is not known yet"
    said = [text for _, text in found(line + "launch.device=cpu", folder)]
    assert [f"have {size} dimensions" in each for each in said] == ([True] if size else [])
    sft = f"{SFT}actor.model_name_or_path={path}"
    assert found(sft, folder) == []


def test_the_sizes_of_heads_are_those_of_vllm():
    vllm = pytest.importorskip("vllm.v1.attention.backends.cpu_attn")
    latent = pytest.importorskip("vllm.v1.attention.backends.mla.cpu_mla")
    assert list(head_sizes_on_cpu()) == vllm.CPUAttentionBackend.get_supported_head_sizes()
    assert list(head_sizes_on_cpu(latent=True)) == latent.CPUMLABackend.get_supported_head_sizes()


ROUTED = {"model_type": "qwen3_moe", "num_experts": 4}


@pytest.mark.notices(
    "a dense model is said to replay routes when it is loaded",
    "preflight/inspections/routing.py",
    "    if num_experts(files.setting) is None:",
    "    if False:",
)
@pytest.mark.parametrize(
    ("settings", "words", "key", "said"),
    [
        (ROUTED, "actor.routing_replay=true actor.freeze_router=true", None, None),
        ({"model_type": "qwen3"}, "actor.routing_replay=true", "actor.routing_replay", "is not a mixture of experts"),
        ({"model_type": "qwen3"}, "actor.freeze_router=true", "actor.freeze_router", "is not a mixture of experts"),
        (ROUTED | {"model_type": "llama4_text"}, "actor.routing_replay=true", "actor.routing_replay", "of Llama 4 are"),
        (
            ROUTED,
            "actor.routing_replay=true vllm.enable_prefix_caching=true launch.device=cpu",
            "vllm.enable_prefix_caching",
            "has no routes for tokens from its prefix cache",
        ),
    ],
)
def test_routes_are_replayed_and_routers_frozen_where_they_are_known(model, settings, words, key, said):
    path = model(tokenizer={"chat_template": "x"}, **settings)
    problems = found(f"{PPO} {RULE} actor.model_name_or_path={path} {words}")
    if key is None:
        assert problems == []
    else:
        assert any(name == key and said in problem for name, problem in problems), problems


@pytest.mark.parametrize(
    ("settings", "words", "hints"),
    [
        (ROUTED, "", 1),
        (ROUTED, "actor.routing_replay=true", 0),
        ({"model_type": "qwen3"}, "", 0),
        (ROUTED | {"model_type": "llama4_text"}, "", 0),
    ],
)
def test_a_run_of_experts_hears_once_of_routing_replay(model, checked, settings, words, hints):
    path = model(tokenizer={"chat_template": "x"}, **settings)
    notes = checked(f"{PPO} {RULE} actor.model_name_or_path={path} {words}").notes
    assert len([note for note in notes if "actor.routing_replay=true" in note]) == hints
