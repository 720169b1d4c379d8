"""Kinds of LoRA adapters that people make with peft, by name: the family of the base, and the settings of peft."""

from __future__ import annotations

from typing import Any

NORM = "model.norm"
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "attention": ("llama", {"target_modules": ["q_proj", "v_proj"]}),
    "all linear layers": ("qwen3", {"target_modules": "all-linear"}),
    "by a regular expression": ("llama", {"target_modules": r".*\.1\.mlp\.(up|down)_proj"}),
    "some layers": ("llama", {"target_modules": ["o_proj"], "layers_to_transform": [1]}),
    "but some modules": ("llama", {"target_modules": "all-linear", "exclude_modules": ["down_proj"]}),
    "rsLoRA": ("llama", {"target_modules": ["q_proj"], "use_rslora": True}),
    "DoRA": ("llama", {"target_modules": ["q_proj", "down_proj"], "use_dora": True}),
    "other ranks": ("llama", {"target_modules": "all-linear", "rank_pattern": {"q_proj": 8, "up_proj": 2}}),
    "other alphas": ("llama", {"target_modules": "all-linear", "alpha_pattern": {r"layers\.1\..*": 16}}),
    "dropout": ("llama", {"target_modules": ["q_proj"], "lora_dropout": 0.5}),
    "PiSSA": ("llama", {"target_modules": ["q_proj"], "init_lora_weights": "pissa"}),
    "OLoRA": ("llama", {"target_modules": ["q_proj"], "init_lora_weights": "olora"}),
    "biases of adapters": ("phi", {"target_modules": ["q_proj", "fc1"], "lora_bias": True}),
    "biases of the base": ("phi", {"target_modules": ["q_proj"], "bias": "all"}),
    "biases of adapted modules": ("gpt2", {"target_modules": ["c_fc"], "bias": "lora_only"}),
    "a bias where the base has none": ("llama", {"target_modules": ["q_proj"], "lora_bias": True}),
    "the head as a whole": ("llama", {"target_modules": ["q_proj"], "modules_to_save": ["lm_head"]}),
    "the embedding as a whole": ("llama", {"target_modules": ["q_proj"], "modules_to_save": ["embed_tokens"]}),
    "both as a whole": ("llama", {"target_modules": ["q_proj"], "modules_to_save": ["embed_tokens", "lm_head"]}),
    "both as one": (
        "llama",
        {"target_modules": ["q_proj"], "modules_to_save": ["embed_tokens"], "ensure_weight_tying": True},
    ),
    "a norm as a whole": ("llama", {"target_modules": ["q_proj"], "modules_to_save": [NORM]}),
    "the embedding": ("llama", {"target_modules": ["embed_tokens", "q_proj"]}),
    "the head": ("llama", {"target_modules": ["lm_head"]}),
    "embedding and head": ("llama", {"target_modules": ["embed_tokens", "lm_head"]}),
    "embedding and head, tied": ("llama", {"target_modules": ["embed_tokens"], "ensure_weight_tying": True}),
    "DoRA of the embedding": ("llama", {"target_modules": ["embed_tokens"], "use_dora": True}),
    "trained tokens": ("llama", {"target_modules": ["q_proj"], "trainable_token_indices": [1, 7, 200]}),
    "trained tokens of the head": (
        "llama",
        {"target_modules": ["q_proj"], "trainable_token_indices": {"lm_head": [3, 4], "embed_tokens": [3, 5]}},
    ),
    "trained tokens, tied": (
        "llama",
        {"target_modules": ["q_proj"], "trainable_token_indices": [1, 7], "ensure_weight_tying": True},
    ),
    "an embedding that is scaled": ("gemma", {"target_modules": ["embed_tokens", "q_proj"]}),
    "matrices [in, out]": ("gpt2", {"target_modules": "all-linear"}),
    "matrices [in, out], as told": ("gpt2", {"target_modules": ["c_attn", "c_proj"], "fan_in_fan_out": True}),
    "DoRA of matrices [in, out]": ("gpt2", {"target_modules": ["c_attn"], "use_dora": True, "fan_in_fan_out": True}),
    "the embedding of GPT-2": ("gpt2", {"target_modules": ["wte", "c_fc"]}),
    "query, key and value as one": ("gpt_neox", {"target_modules": ["query_key_value"]}),
    "one key for all heads": ("falcon", {"target_modules": ["query_key_value", "dense"]}),
    "OPT": ("opt", {"target_modules": ["fc1", "fc2", "out_proj"]}),
    "stacked experts": (
        "mixtral",
        {"target_modules": [], "target_parameters": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]},
    ),
    "experts, routers and attention": ("qwen3_moe", {"target_modules": "all-linear"}),
    "one of two stacks": (
        "qwen3_moe",
        {"target_modules": ["q_proj"], "target_parameters": ["mlp.experts.down_proj"]},
    ),
    "layers used twice": ("llama", {"target_modules": ["q_proj"], "layer_replication": [[0, 2], [1, 2]]}),
    "activated LoRA": ("llama", {"target_modules": ["q_proj"], "alora_invocation_tokens": [5, 6]}),
}
