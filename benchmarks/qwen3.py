"""Random weights in the shapes of Qwen3 and Qwen2.5, for measurements that need a real size and no download."""

from __future__ import annotations

from pathlib import Path

# Of the configurations of Qwen3-0.6B, Qwen3-4B and Qwen2.5-0.5B; the others have the parts of Qwen3, for small machines
# and dry runs.
SHAPES = {
    "qwen3-0.6b": {
        "vocab_size": 151_936,
        "hidden_size": 1024,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "intermediate_size": 3072,
    },
    "qwen3-4b": {
        "vocab_size": 151_936,
        "hidden_size": 2560,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "intermediate_size": 9728,
    },
    "qwen2.5-0.5b": {
        "model_type": "qwen2",
        "vocab_size": 151_936,
        "hidden_size": 896,
        "num_hidden_layers": 24,
        "num_attention_heads": 14,
        "num_key_value_heads": 2,
        "intermediate_size": 4864,
    },
    "qwen3-0.1b": {
        "vocab_size": 320,
        "hidden_size": 768,
        "num_hidden_layers": 12,
        "num_attention_heads": 12,
        "num_key_value_heads": 12,
        "head_dim": 64,
        "intermediate_size": 2304,
    },
    "tiny": {
        "vocab_size": 320,
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "intermediate_size": 128,
    },
}


def random_qwen3(folder: Path, shape: str, device: str = "cpu") -> str:
    """Return `folder`, with a model of a shape: random bf16 weights, drawn on `device`, and the byte tokenizer."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    from rlhf_suite.models.builtin import byte_tokenizer

    if not (folder / "config.json").exists():
        tokenizer = byte_tokenizer()
        ends = {name: getattr(tokenizer, name) for name in ("pad_token_id", "bos_token_id", "eos_token_id")}
        common = {"max_position_embeddings": 40_960, "rope_theta": 1_000_000.0, "tie_word_embeddings": True}
        torch.manual_seed(0)
        with torch.device(device):
            config = AutoConfig.for_model(**({"model_type": "qwen3"} | SHAPES[shape]), **common, **ends)
            model = AutoModelForCausalLM.from_config(config).to(torch.bfloat16)
        tokenizer.save_pretrained(folder)
        model.save_pretrained(folder)
    return str(folder)
