"""Models that need no download: a byte tokenizer and random weights, written as a Hugging Face folder.

`builtin:tiny` is a Qwen3 of 0.16 million parameters that learns character tasks on one CPU core in seconds.
`builtin:small`, of 12 million, is meant for measurements.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)
from transformers.core_model_loading import revert_weight_conversion

from rlhf_suite.disk import cache_folder, written_aside
from rlhf_suite.errors import UserError
from rlhf_suite.models.weights import write_weights

PREFIX = "builtin:"
TIED = "lm_head.weight"  # in a tied model the same tensor as the embedding
PAD, BOS, EOS, START = "<|pad|>", "<|begin|>", "<|im_end|>", "<|im_start|>"
ROLES = ("system", "user", "assistant", "tool")  # one token each, so that the template needs few tokens
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


@dataclass(frozen=True)
class Shape:
    """The architecture and size of a built-in model."""

    family: str = "qwen3"  # a name in FAMILIES
    hidden: int = 64
    layers: int = 2
    heads: int = 4
    kv_heads: int = 2
    vocabulary: int = 0  # 0: the size of the tokenizer
    tied: bool = True
    max_length: int = 4096


# For each family: configuration class, model class, arguments that only this family has.
FAMILIES: dict[str, tuple[Any, Any, dict[str, int]]] = {
    "qwen3": (Qwen3Config, Qwen3ForCausalLM, {}),
    "llama": (LlamaConfig, LlamaForCausalLM, {}),
    "mixtral": (MixtralConfig, MixtralForCausalLM, {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "qwen3_moe": (
        Qwen3MoeConfig,
        Qwen3MoeForCausalLM,
        {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64},
    ),
}
SHAPES = {"tiny": Shape(), "small": Shape(hidden=256, layers=12, heads=8, kv_heads=4, vocabulary=2048)}


def builtin_folder(name: str, flag: str) -> Path:
    """Return the folder of `builtin:<name>` in the user's cache, and write it the first time. It is equal on every
    machine."""
    shape = SHAPES.get(name.removeprefix(PREFIX))
    if shape is None:
        raise UserError(
            f"{flag}={name}: there is no such model. Write {' or '.join(PREFIX + known for known in SHAPES)}"
        )
    version = hashlib.sha256(Path(__file__).read_bytes()).hexdigest()[:12]
    folder = cache_folder("builtin") / f"{name.removeprefix(PREFIX)}-{version}"
    if not folder.exists():
        create(folder, shape)
    return folder


def create_tiny(path: Path, seed: int = 0) -> None:
    """Write `builtin:tiny` to a folder."""
    create(path, SHAPES["tiny"], seed)


def create(path: Path, shape: Shape, seed: int = 0) -> None:
    """Write a model folder with random weights. Equal seeds give equal weights."""
    tokenizer = byte_tokenizer()
    config_class, model_class, extra = FAMILIES[shape.family]
    config = config_class(**sizes(shape, tokenizer), **extra)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = model_class(config)
    # Set only now: transformers zeroes the embedding of the padding token, and the gradient of a norm of zeros explodes
    # if a policy happens to sample that token.
    config.pad_token_id = model.generation_config.pad_token_id = tokenizer.pad_token_id
    config.architectures, config.dtype = [model_class.__name__], torch.float32
    weights = {name: tensor for name, tensor in model.state_dict().items() if not (shape.tied and name == TIED)}
    with written_aside(path, keep=True) as folder:
        config.save_pretrained(folder)
        model.generation_config.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        write_weights({n: t.contiguous() for n, t in revert_weight_conversion(model, weights).items()}, folder)


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer with one token per UTF-8 byte, so that it encodes any text, plus special tokens and role
    names."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE(vocab={char: index for index, char in enumerate(alphabet)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([PAD, BOS, EOS, START])
    backend.add_tokens(list(ROLES))
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        pad_token=PAD,
        bos_token=BOS,
        eos_token=EOS,
        additional_special_tokens=[START],
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
        model_max_length=4096,
    )


def sizes(shape: Shape, tokenizer: PreTrainedTokenizerFast) -> dict[str, Any]:
    """Return a shape under the names of transformers' configurations."""
    return {
        "vocab_size": shape.vocabulary or len(tokenizer),
        "hidden_size": shape.hidden,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": max(32, shape.hidden // shape.heads),  # the smallest size of vLLM's attention kernels for CPUs
        "intermediate_size": 4 * shape.hidden,
        "initializer_range": 0.5 / shape.hidden**0.5,  # a narrow model learns nothing for long with the usual 0.02
        "max_position_embeddings": shape.max_length,
        "tie_word_embeddings": shape.tied,
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
    }
