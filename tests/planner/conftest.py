"""A model that is only a config.json."""

from __future__ import annotations

import json

import pytest

QWEN3 = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "vocab_size": 151_936,
    "hidden_size": 1024,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "intermediate_size": 3072,
    "tie_word_embeddings": True,
}


@pytest.fixture
def folder(tmp_path):
    """Write a config.json alone, without weights."""

    def write(**changes):
        name = "-".join(f"{value}" for value in changes.values()) or "qwen3"
        (tmp_path / name).mkdir(exist_ok=True)
        (tmp_path / name / "config.json").write_text(json.dumps(QWEN3 | changes))
        return str(tmp_path / name)

    return write
