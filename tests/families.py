"""Tiny models of many families, made from configurations of transformers, with tokenizers made here."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from rlhf_suite.models.builtin import byte_tokenizer

LAYERS = {"num_hidden_layers": 2, "hidden_size": 32, "num_attention_heads": 4, "max_position_embeddings": 128}
HEADS = LAYERS | {"num_key_value_heads": 2, "intermediate_size": 64}
EXPERTS = {"num_experts_per_tok": 2, "head_dim": 8}
# For each family of transformers: the name of its classes, and a tiny shape in its own words.
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", HEADS),
    "qwen2": ("Qwen2", HEADS),
    "qwen3": ("Qwen3", HEADS | {"head_dim": 8}),
    "mistral": ("Mistral", HEADS),
    "gemma": ("Gemma", HEADS | {"head_dim": 8}),
    "phi": ("Phi", LAYERS | {"intermediate_size": 64}),
    "gpt2": ("GPT2", {"n_layer": 2, "n_embd": 32, "n_head": 4, "n_positions": 128}),
    "gpt_bigcode": ("GPTBigCode", {"n_layer": 2, "n_embd": 32, "n_head": 4, "n_positions": 128}),
    "gptj": ("GPTJ", {"n_layer": 2, "n_embd": 32, "n_head": 4, "n_positions": 128, "rotary_dim": 4}),
    "gpt_neox": ("GPTNeoX", LAYERS | {"intermediate_size": 64}),
    "opt": ("OPT", LAYERS | {"ffn_dim": 64, "word_embed_proj_dim": 32}),
    "bloom": ("Bloom", {"n_layer": 2, "hidden_size": 32, "n_head": 4}),
    "falcon": ("Falcon", LAYERS | {"new_decoder_architecture": False}),
    "mixtral": ("Mixtral", HEADS | EXPERTS | {"num_local_experts": 4}),
    "qwen3_moe": ("Qwen3Moe", HEADS | EXPERTS | {"num_experts": 4, "moe_intermediate_size": 16}),
}


HYBRID = {"layer_types": ["linear_attention", "full_attention"] * 2}
SLIDING = {"layer_types": ["sliding_attention", "full_attention"] * 2, "sliding_window": 6}
SPARSE = {"num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
ROUTED = {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "n_group": 1, "topk_group": 1}
DELTA = HYBRID | {
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "linear_conv_kernel_dim": 4,
}
LATENT = {
    **{"q_lora_rank": 16, "kv_lora_rank": 16, "qk_nope_head_dim": 16, "qk_rope_head_dim": 16, "v_head_dim": 16},
    "num_key_value_heads": 4,
}
# For each `model_type` that people train today, settings of a tiny model beside those of `TYPED`.
TYPED = {
    **{"hidden_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16},
    **{"intermediate_size": 128, "max_position_embeddings": 512},
}
TYPES: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral": {},
    "ministral": SLIDING,
    "mixtral": {"num_local_experts": 4},
    "qwen2": {},
    "qwen2_moe": SPARSE | {"shared_expert_intermediate_size": 32},
    "qwen3": {},
    "qwen3_moe": SPARSE,
    "smollm3": {},
    "phi3": {},
    "olmo2": {},
    "olmo3": SLIDING,
    "glm4": {},
    "glm4_moe": ROUTED | {"first_k_dense_replace": 1},
    "deepseek_v3": ROUTED | LATENT | {"first_k_dense_replace": 1},
    "minimax_m2": SPARSE,
    "gemma": {},
    "gemma2": SLIDING | {"attn_logit_softcapping": 5.0, "final_logit_softcapping": 3.0, "query_pre_attn_scalar": 16},
    "gemma3_text": SLIDING,
    "gemma4_text": SLIDING
    | {"hidden_size_per_layer_input": 16, "vocab_size_per_layer_input": 320, "num_kv_shared_layers": 0}
    | {"global_head_dim": 16, "final_logit_softcapping": 5.0},
    "granite": {"logits_scaling": 4.0, "attention_multiplier": 0.2, "residual_multiplier": 0.5},
    "granitemoe": {"num_local_experts": 4, "num_experts_per_tok": 2, "logits_scaling": 4.0},
    "cohere": {"logit_scale": 0.5},
    "cohere2": SLIDING | {"logit_scale": 0.5},
    "gpt_oss": SPARSE | SLIDING,
    "llama4_text": SPARSE
    | {"intermediate_size_mlp": 128, "attention_chunk_size": 8}
    | {"layer_types": ["chunked_attention", "full_attention"] * 2, "no_rope_layers": [1, 0, 1, 0]},
    "qwen3_next": SPARSE | DELTA | {"shared_expert_intermediate_size": 32},
    "qwen3_5_text": DELTA,
    "qwen3_5_moe_text": SPARSE | DELTA | {"shared_expert_intermediate_size": 32},
    "olmo_hybrid": DELTA,
    "kimi_linear": LATENT
    | {"num_experts": 4, "num_experts_per_token": 2, "moe_intermediate_size": 32, "linear_head_dim": 16}
    | {"linear_num_heads": 4, "layer_types": ["linear_attention", "full_attention"] * 2},
    "lfm2": {"layer_types": ["conv", "full_attention"] * 2},
    "lfm2_moe": SPARSE | {"layer_types": ["conv", "full_attention"] * 2, "num_dense_layers": 1},
    "nemotron_h": {
        **{"mamba_num_heads": 4, "mamba_head_dim": 16, "ssm_state_size": 16, "n_groups": 1},
        **{"layers_block_type": ["mamba", "attention", "mamba", "moe"], "moe_shared_expert_intermediate_size": 32},
        **ROUTED,
    },
    "granitemoehybrid": {
        **{"mamba_n_heads": 4, "mamba_d_head": 32, "mamba_d_state": 16, "mamba_n_groups": 1, "logits_scaling": 4.0},
        **{"num_local_experts": 4, "num_experts_per_tok": 2, "shared_intermediate_size": 64},
        "layer_types": ["mamba", "attention"] * 2,
    },
}


def make_typed(path: Path, model_type: str, **settings: Any) -> None:
    """Write the folder of a tiny model of a `model_type` of transformers, with weights that are not flat."""
    tokenizer = byte_tokenizer()
    tokens = {f"{name}_token_id": getattr(tokenizer, f"{name}_token_id") for name in ("bos", "eos", "pad")}
    shape = TYPED | {"vocab_size": 320} | tokens | TYPES[model_type] | settings
    config = transformers.CONFIG_MAPPING[model_type](**shape)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(0.05 * torch.randn(parameter.shape))
    model.save_pretrained(path)
    tokenizer.save_pretrained(path)


def make(
    path: Path, family: str, *, tokenizer: PreTrainedTokenizerFast | None = None, scores: bool = False, **settings: Any
) -> PreTrainedModel:
    """Write the folder of a model of `family` with random weights, and return the model. `settings` are of its
    configuration."""
    name, shape = FAMILIES[family]
    tokenizer = tokenizer or byte_tokenizer()
    tokens = {f"{name}_token_id": getattr(tokenizer, f"{name}_token_id") for name in ("bos", "eos", "pad")}
    shape = shape | {"vocab_size": len(tokenizer), "initializer_range": 0.1} | tokens
    config = getattr(transformers, f"{name}Config")(**(shape | settings))
    head = "ForSequenceClassification" if scores else "LMHeadModel" if name == "GPT2" else "ForCausalLM"
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model: PreTrainedModel = getattr(transformers, name + head)(config)
    model.save_pretrained(path)
    tokenizer.save_pretrained(path)
    return model


def plain_tokenizer(*added: str, eos: str = "<|endoftext|>", **special: str) -> PreTrainedTokenizerFast:
    """Return a tokenizer of bytes that has EOS alone, as that of GPT-2, and the special tokens that are named."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE(vocab={char: index for index, char in enumerate(alphabet)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([eos, *added])
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token=eos, **special)
