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
